"""Pinned assets: found, verified, joined; every fault named with its remedy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from swaralign.assets import check_unsharded, locate, pin_assets, resolve, resolve_file
from swaralign.params import AssetsParams, LocalAsset, PackageAsset, load_params


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def local(path: str, files: dict[str, bytes]) -> LocalAsset:
    hashes = {file: sha(data) for file, data in files.items()}
    return LocalAsset(source="local", path=path, id=f"house/{path}", revision="r7", files=hashes)


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AssetsParams:
    """Five small assets below tmp_path; the recogniser is one file split over two installed packages."""
    contents = {
        "base": {"model.safetensors": b"weights", "codec/config.json": b"{}"},
        "adapter": {"adapters.safetensors": b"lora"},
        "reference": {"clip.flac": b"flac"},
        "prompts": {"corpus.parquet": b"rows"},
    }
    for folder, files in contents.items():
        for file, data in files.items():
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).write_bytes(data)
    for package, data in (("asr_part_one", b"first,"), ("asr_part_two", b"second")):
        (tmp_path / "site" / package).mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").write_text("raise RuntimeError('located, never imported')")
        (tmp_path / "site" / package / "model.part").write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("SWARALIGN_CACHE", str(tmp_path / "cache"))
    asr = PackageAsset(source="package", id="house/asr", revision="r9", files={"model.bin": sha(b"first,second")},
                       parts={"model.bin": ["asr_part_one/model.part", "asr_part_two/model.part"]})
    return AssetsParams(**{name: local(name, files) for name, files in contents.items()}, asr=asr,
                        second_asr=None, mos=None, speaker_encoder=None)


def repinned(assets: AssetsParams, name: str, **changes: object) -> AssetsParams:
    return assets.model_copy(update={name: getattr(assets, name).model_copy(update=changes)})


def test_the_pins_hold_every_asset_and_no_path(assets: AssetsParams, tmp_path: Path) -> None:
    pinned = pin_assets(assets, tmp_path)
    assert list(pinned) == ["base", "adapter", "reference", "prompts", "asr"]
    assert pinned["base"] == {
        "source": "local", "id": "house/base", "revision": "r7",
        "files": {"codec/config.json": sha(b"{}"), "model.safetensors": sha(b"weights")},
    }
    assert str(tmp_path) not in str(pinned)


def test_a_local_asset_is_used_in_place(assets: AssetsParams, tmp_path: Path) -> None:
    assert resolve("reference", assets, tmp_path) == tmp_path / "reference"


def test_an_asset_of_one_file_is_that_file(assets: AssetsParams, tmp_path: Path) -> None:
    assert resolve_file("reference", assets, tmp_path) == tmp_path / "reference" / "clip.flac"
    with pytest.raises(ValueError, match=r"assets\.base\.files must name exactly one file, found model"):
        resolve_file("base", assets, tmp_path)


def test_the_working_folder_itself_can_hold_an_asset(
    assets: AssetsParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "base")
    assert resolve("base", repinned(assets, "base", path=".")) == Path()


def test_pieces_are_located_in_order_without_reading_them(assets: AssetsParams, tmp_path: Path) -> None:
    (tmp_path / "site" / "asr_part_one" / "model.part").write_bytes(b"not what is pinned")
    pieces = [tmp_path / "site" / package / "model.part" for package in ("asr_part_one", "asr_part_two")]
    assert locate("asr", assets) == {"model.bin": pieces}


def test_split_package_files_are_joined_in_order_once(assets: AssetsParams, tmp_path: Path) -> None:
    folder = resolve("asr", assets)
    assert folder.is_relative_to(tmp_path / "cache" / "assets")
    assert (folder / "model.bin").read_bytes() == b"first,second"
    made = (folder / "model.bin").stat().st_mtime_ns
    assert resolve("asr", assets) == folder
    assert (folder / "model.bin").stat().st_mtime_ns == made


def test_a_damaged_cache_is_joined_anew(assets: AssetsParams) -> None:
    folder = resolve("asr", assets)
    (folder / "model.bin").write_bytes(b"first,sec")
    assert (resolve("asr", assets) / "model.bin").read_bytes() == b"first,second"


def test_whole_files_side_by_side_are_used_in_the_package(assets: AssetsParams, tmp_path: Path) -> None:
    parts = {"model.part": ["asr_part_one/model.part"]}
    whole = repinned(assets, "asr", files={"model.part": sha(b"first,")}, parts=parts)
    assert resolve("asr", whole) == tmp_path / "site" / "asr_part_one"
    assert not (tmp_path / "cache").exists()


def test_a_wrong_base_hash_names_asset_file_both_hashes_and_the_remedy(assets: AssetsParams, tmp_path: Path) -> None:
    (tmp_path / "base" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError) as caught:
        pin_assets(assets, tmp_path)
    message = str(caught.value)
    assert message.startswith("assets.base: model.safetensors ")
    assert f"expected SHA-256 {sha(b'weights')}, found {sha(b'other weights')}" in message
    assert "fetch it again from house/base at revision r7" in message and "assets.base.files" in message


def test_wrong_hash_of_joined_parts(assets: AssetsParams) -> None:
    wrong = repinned(assets, "asr", files={"model.bin": "0" * 64})
    expected = r"assets\.asr: model\.bin .*expected SHA-256 0{64}, found " + sha(b"first,second")
    with pytest.raises(ValueError, match=expected):
        resolve("asr", wrong)


def test_a_missing_file_names_it_and_where_to_get_it(assets: AssetsParams, tmp_path: Path) -> None:
    (tmp_path / "adapter" / "adapters.safetensors").unlink()
    expected = r"assets\.adapter: .*adapters\.safetensors does not exist; fetch .*house/adapter"
    with pytest.raises(ValueError, match=expected):
        resolve("adapter", assets, tmp_path)


def test_a_missing_scorer_package_names_it_and_the_install_command(assets: AssetsParams) -> None:
    absent = repinned(assets, "asr", parts={"model.bin": ["asr_part_one/model.part", "asr_part_three/model.part"]})
    with pytest.raises(ValueError, match=r"assets\.asr: model\.bin .*asr_part_three.*`pip install asr-part-three`"):
        resolve("asr", absent)


def test_a_package_without_the_file(assets: AssetsParams) -> None:
    absent = repinned(assets, "asr", parts={"model.bin": ["asr_part_one/other.part"]})
    with pytest.raises(ValueError, match=r"asr_part_one has no file other\.part, needed for model\.bin"):
        resolve("asr", absent)


@pytest.mark.parametrize("extra", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_sharded_base_is_refused(assets: AssetsParams, tmp_path: Path, extra: str) -> None:
    (tmp_path / "base" / extra).write_bytes(b"")
    with pytest.raises(ValueError, match=r"exactly one weight file at its root, model\.safetensors.*" + extra):
        resolve("base", assets, tmp_path)


@pytest.mark.parametrize("extra", ["special_tokens_map.json", "codec/other.bin"])
def test_a_base_with_a_file_that_nothing_pins_is_refused(assets: AssetsParams, tmp_path: Path, extra: str) -> None:
    (tmp_path / "base" / extra).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"holds files that assets\.base\.files does not pin: {extra}"):
        resolve("base", assets, tmp_path)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        check_unsharded(tmp_path)


def test_whisper_base_as_shipped_is_found_and_verified() -> None:
    folder = resolve("asr", load_params().assets)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.bin", "tokenizer.json", "vocabulary.txt",
    ]
