"""Assets of the hub, from one on the loopback interface: fetched once, verified, every fault with its remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from ruamel.yaml import YAML

from benchmarks.full_size_whisper import write_whisper
from swaralign.assets import locate, pin_assets, resolve
from swaralign.checks import check
from swaralign.params import AssetsParams, HubAsset, HubRowsAsset, LocalAsset, load_params
from tests.loopback_hub import COMMIT, TOKEN, Hub, connect, git_id, serve, sha256
from tests.voices import TINY_WHISPER

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = np.random.default_rng(0).bytes(100_000)
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "codec/config.json": b'{"codec": 1}'}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repos = {"house/base": FILES | {"README.md": b"-", ".gitattributes": b"-"},
             "datasets/house/corpus": {"Hindi/train-00000-of-00001.parquet": b"0" * 5000}}
    with serve(Hub(repos)) as hub:
        connect(hub, tmp_path, monkeypatch)
        yield hub


def hub_asset(**changes: Any) -> HubAsset:
    values: dict[str, Any] = {"source": "hub", "repo_type": "model", "id": "house/base", "revision": COMMIT,
                              "files": {file: sha256(data) for file, data in FILES.items()}}
    return HubAsset(**(values | changes))


def assets(base: HubAsset, **others: Any) -> AssetsParams:
    empty = dict.fromkeys(AssetsParams.model_fields) | others
    return AssetsParams.model_construct(**(empty | {"base": base}))


def test_files_are_fetched_once_and_used_in_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    folder = resolve("base", assets(hub_asset()))
    assert folder == tmp_path / "hub-cache" / "models--house--base" / "snapshots" / COMMIT
    assert {file: (folder / file).read_bytes() for file in FILES} == FILES
    asked = len(hub.asked)
    assert resolve("base", assets(hub_asset())) == folder
    assert len(hub.asked) == asked and not (tmp_path / "cache").exists()


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is written at once, 10 MB otherwise
    hub.cut = [30_000, 50_000]
    resolve("base", assets(hub_asset(files={"model.safetensors": sha256(WEIGHTS)})))
    ranges = [ranged for method, path, ranged in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=30000-", "bytes=80000-"]
    assert hub.sent == len(WEIGHTS)


def test_the_record_holds_hashes_found_where_none_is_pinned(hub: Hub) -> None:
    prompts = HubRowsAsset(source="hub_rows", id="house/corpus", revision=COMMIT, pattern="Hindi/train-*.parquet")
    unpinned = hub_asset(files=dict.fromkeys(FILES))
    pinned = pin_assets(assets(unpinned, prompts=prompts))
    assert pinned == {
        "base": {"source": "hub", "id": "house/base", "revision": COMMIT,
                 "files": {file: sha256(FILES[file]) for file in sorted(FILES)}},
        "prompts": {"source": "hub_rows", "id": "house/corpus", "revision": COMMIT,
                    "files": {"Hindi/train-00000-of-00001.parquet": sha256(b"0" * 5000)}},
    }
    assert pin_assets(assets(hub_asset()))["base"] == pinned["base"]


def test_a_wrong_hash_names_file_expected_found_and_the_remedy(hub: Hub) -> None:
    with pytest.raises(ValueError) as caught:
        resolve("base", assets(hub_asset(files={"config.json": "0" * 64, "model.safetensors": sha256(WEIGHTS)})))
    message = str(caught.value)
    assert message.startswith("assets.base: config.json is not the pinned one: ")
    assert f"expected SHA-256 {'0' * 64}, found {sha256(b'{}')}" in message
    assert f"delete it, so that it is fetched again from house/base at revision {COMMIT}" in message


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_without_a_pinned_hash_must_be_what_the_commit_records(hub: Hub, file: str) -> None:
    unpinned = assets(hub_asset(files=dict.fromkeys(FILES)))
    resolve("base", unpinned)
    path = locate("base", unpinned)[file][0]
    stated = {"model.safetensors": sha256(WEIGHTS), "config.json": git_id(b"{}")}[file]
    path.resolve().write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"{file} is not the pinned one: expected {stated}, as the commit records it"):
        resolve("base", unpinned)


def test_offline_uses_the_cache_and_never_asks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="not all of it is in the cache, and HF_HUB_OFFLINE forbids to fetch the rest"):
        resolve("base", assets(hub_asset()))
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve("base", assets(hub_asset()))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert resolve("base", assets(hub_asset())) == folder and len(hub.asked) == asked


def test_no_network_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(ValueError, match=r"no connection to http://127\.0\.0\.1:9 \(.*HF_HUB_OFFLINE=1 uses the cache"):
        resolve("base", assets(hub_asset()))


@pytest.mark.parametrize(("changes", "told"), [
    ({"revision": "f" * 40}, r"has no such revision; correct assets\.base\.revision"),
    ({"id": "house/none"}, r"no such repository at .*/house/none, or a private one"),
    ({"files": {"other.json": None}}, r"lacks what is asked for: .*; correct assets\.base\.files"),
])
def test_wrong_pins_are_told(hub: Hub, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve("base", assets(hub_asset(**changes)))


def test_a_gated_repository_opens_with_the_usual_login(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("house/base")
    with pytest.raises(ValueError, match=rf"is gated: log in at {hub.url}/house/base, accept its terms, then run `hf"):
        resolve("base", assets(hub_asset()))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (resolve("base", assets(hub_asset())) / "config.json").read_bytes() == b"{}"


def test_a_token_that_is_refused_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.expired.add("hf_old")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(ValueError, match=r"the hub answers 401, .*it refuses this token: run `hf auth login`"):
        resolve("base", assets(hub_asset()))


def test_a_second_weight_file_at_the_root_is_refused_but_a_readme_is_not(hub: Hub) -> None:
    folder = resolve("base", assets(hub_asset()))
    (folder / "README.md").write_text("-")
    resolve("base", assets(hub_asset()))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="exactly one weight file at its root"):
        resolve("base", assets(hub_asset()))


def test_check_says_what_a_run_will_fetch(hub: Hub, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "recipes/qwen3-hindi-grpo.yaml", tmp_path / "params.yaml")
    told = {fact.found for fact in check(tmp_path, full=True) if fact.subject == "assets" and fact.ok}
    assert "base: Qwen/Qwen3-TTS-12Hz-0.6B-Base on the hub at 5d83992436ea, to be fetched by the first run" in told
    assert "prompts: ai4bharat/indicvoices_r on the hub at 5f4495c91d50, read there in place" in told
    assert hub.asked == []


def test_the_stage_itself(hub: Hub, tmp_path: Path) -> None:
    """As a user runs it: the endpoint, the token and the caches come from the environment."""
    params = YAML(typ="safe").load((ROOT / "recipes/demo.yaml").read_text(encoding="utf-8"))
    hub.gated.add("house/base")
    params["assets"]["base"] = hub_asset().model_dump(exclude={"convert"})
    for name in ("adapter", "reference", "prompts"):
        params["assets"][name]["path"] = str(ROOT / params["assets"][name]["path"])
    YAML().dump(params, tmp_path / "params.yaml")
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"),
                   "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "stages.assets"]
    refused = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert refused.returncode and "is gated: log in at" in refused.stderr and "Traceback" not in refused.stderr
    subprocess.run(run, cwd=tmp_path, env=environment | {"HF_TOKEN": TOKEN}, check=True, capture_output=True)
    recorded = json.loads((tmp_path / "data/assets.json").read_text(encoding="utf-8"))
    assert recorded["base"]["files"] == {file: sha256(data) for file, data in FILES.items()}


# Conversion of a Whisper


@pytest.fixture
def whisper(tmp_path: Path) -> LocalAsset:
    """A tiny random Whisper in transformers' form, with the tokenizer of the real one."""
    folder = tmp_path / "whisper"
    real = resolve("asr", load_params(ROOT / "recipes/demo.yaml").assets)
    write_whisper(folder, real / "tokenizer.json", 0, TINY_WHISPER)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return LocalAsset(source="local", path=str(folder), id="house/whisper", revision="1", files=hashes,
                      convert="ctranslate2")


def test_a_whisper_of_transformers_is_converted_once_and_transcribes(
    whisper: LocalAsset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swaralign.rewards.asr import Transcriber

    monkeypatch.setenv("SWARALIGN_CACHE", str(tmp_path / "cache"))
    pinned = assets(hub_asset()).model_copy(update={"asr": whisper, "base": None})
    folder = resolve("asr", pinned)
    assert folder.is_relative_to(tmp_path / "cache" / "ctranslate2")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.bin", "preprocessor_config.json", "tokenizer.json", "vocabulary.json"}
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = (folder / "model.bin").stat().st_mtime_ns
    assert resolve("asr", pinned) == folder and (folder / "model.bin").stat().st_mtime_ns == made
    (folder / "model.bin").write_bytes(b"damaged")
    resolve("asr", pinned)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first

    params = load_params(ROOT / "recipes/demo.yaml").reward.asr.model_copy(update={"language": "hi", "max_tokens": 8})
    wave = np.random.default_rng(0).normal(size=16_000).astype(np.float32)
    assert isinstance(Transcriber(folder, params, 1, "cpu").transcribe([wave], 16_000)[0], str)
    assert pin_assets(pinned)["asr"]["convert"] == "ctranslate2"


def test_a_conversion_says_which_files_it_needs(whisper: LocalAsset) -> None:
    lacking = whisper.model_copy(update={"files": {"config.json": whisper.files["config.json"]}})
    pinned = assets(hub_asset()).model_copy(update={"asr": lacking})
    with pytest.raises(ValueError, match=r"needs model\.safetensors, tokenizer\.json, .* among assets\.asr\.files"):
        resolve("asr", pinned)
