"""Text lists as a source of the split, a base without an adapter, and the rules of the params for this family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from swaralign.artifacts import sha256_file, sha256_tree
from swaralign.merge import build_merge
from swaralign.params import LocalAsset, TextSplitParams, load_params, parse_params
from swaralign.rewards.text import normalise, reference_text
from swaralign.split import build_split, collect_texts, read_sentences

ROOT = Path(__file__).resolve().parent.parent
MICRO = ROOT / "recipes" / "outetts-micro.yaml"
LISTS = sorted((ROOT / "data" / "prompts" / "english").glob("*.txt"))


def text_params(**changes: Any) -> TextSplitParams:
    values: dict[str, Any] = {"source": "text", "config": "English", "id_prefix": "en", "train_files": ["a.txt"],
                              "held_out_files": ["b.txt"], "expected_train": 2, "held_out": 1}
    return TextSplitParams(**(values | changes))


def write_lists(folder: Path, a: str = "# note\nOne.\n\n  Two? \n...\n", b: str = "Three!\n") -> list[Path]:
    (folder / "a.txt").write_text(a, encoding="utf-8")
    (folder / "b.txt").write_text(b, encoding="utf-8")
    return [folder / "a.txt", folder / "b.txt"]


def test_sentences_become_prompts_on_the_side_of_their_list(tmp_path: Path) -> None:
    dataset = LocalAsset(source="local", path=".", id="house/lists", revision="1", files={"a.txt": "0" * 64})
    build_split(write_lists(tmp_path), dataset, text_params(), tmp_path / "out")
    train, validation = (pq.read_table(tmp_path / "out" / f"{side}.parquet").to_pylist() for side in
                         ("train", "validation"))
    assert [(row["extra_info"]["id"], row["extra_info"]["text"]) for row in train] == [
        ("en-00000000", "One."), ("en-00000001", "Two?")]
    assert [row["extra_info"]["id"] for row in validation] == ["en-00000003"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rejected"]["train"] == {"duration": 0, "snr": 0, "text": 1}
    assert manifest["selection"] == "every sentence of a.txt; b.txt held out"


@pytest.mark.parametrize(
    ("lists", "changes", "told"),
    [
        ({}, {"expected_train": 3}, r"split\.expected_train: expected 3, found 2 .*duration 0, snr 0, text 1"),
        ({}, {"held_out": 2}, r"split\.held_out: expected 2, found 1"),
        ({}, {"train_files": ["c.txt"]}, r"the list c\.txt, but assets\.prompts has a\.txt, b\.txt"),
        ({"a": "One.\nOne.\n"}, {}, r"a\.txt: 'One\.' stands twice"),
        ({"b": "Two?\n"}, {}, r"'Two\?' stands in both splits: en-00000001 is trained on and en-00000003 is held out"),
    ],
)
def test_faulty_lists_are_told(
    tmp_path: Path, lists: dict[str, str], changes: dict[str, Any], told: str
) -> None:
    dataset = LocalAsset(source="local", path=".", id="x", revision="1", files={"a.txt": "0" * 64})
    with pytest.raises(ValueError, match=told):
        build_split(write_lists(tmp_path, **lists), dataset, text_params(**changes), tmp_path / "out")


def test_a_list_may_begin_with_a_mark_of_its_encoding_and_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff# note\nOne.\n".encode())
    assert read_sentences(path) == ["One."]
    path.write_bytes("caf\u00e9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 \(.*\); save it as UTF-8"):
        read_sentences(path)


def test_lists_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [tmp_path / side / "a.txt" for side in ("easy", "hard")]
    for path, text in zip(paths, ("One.", "Two."), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    params = text_params(train_files=["easy/a.txt"], held_out_files=["hard/a.txt"], expected_train=1)
    assert [side.prompts[0].text for side in collect_texts(paths, params)] == ["One.", "Two."]
    with pytest.raises(ValueError, match=r"has 2 of that name; name it with its folder, as easy/a\.txt"):
        collect_texts(paths, text_params(train_files=["a.txt"], expected_train=1))


def test_shipped_lists_hold_enough_and_leak_nothing() -> None:
    """As many as the source has, each scorable, none the same as another once normalised as the scorer does."""
    params = text_params(
        train_files=["train_easy.txt", "train_hard.txt"], held_out_files=["held_out_easy.txt", "held_out_hard.txt"],
        expected_train=53, held_out=30,
    )
    train, validation = collect_texts(LISTS, params)
    texts = [prompt.text for prompt in (*train.prompts, *validation.prompts)]
    assert all(reference_text(text, "english") for text in texts)
    assert len({normalise(text, "english") for text in texts}) == len(texts) == sum(
        len(read_sentences(path)) for path in LISTS)


def test_a_base_without_an_adapter_passes_through(tmp_path: Path) -> None:
    assets = load_params(MICRO).assets
    base = ROOT / "data" / "outetts-micro" / "base"
    build_merge(base, None, assets, None, tmp_path / "merge")
    assert sha256_tree(tmp_path / "merge" / "checkpoint") == dict(assets.base.files)
    manifest = json.loads((tmp_path / "merge" / "manifest.json").read_text())
    assert manifest["adapter"] is None and manifest["base"]["id"] == assets.base.id
    assert sorted(path.name for path in (tmp_path / "merge").iterdir()) == ["checkpoint", "manifest.json"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"speaker": {"kind": "x_vector", "min_duration_s": 1.0}},
         "speaker.kind is 'x_vector', but a voice of rollout.family 'outetts' speaks as a 'profile'"),
        ({"merge": {"orientation": "peft", "scale": None, "expected_modules": 1}}, "assets.adapter and merge belong"),
        ({"rollout.max_tokens": 5000}, "rollout.max_tokens 5000 can hold 33.33 s of speech, longer than "
                                       "reward.asr.window_s 8.0: such takes could not be scored; 1200 would do"),
        ({"rollout.max_frames": 5}, "rollout.max_frames: unknown key; did you mean"),
        ({"rollout.family": "outtets"}, "rollout: Input tag 'outtets'"),
        ({"split.source": "corpus"}, "split.scenario: missing"),
        ({"speaker.compute_type": "float16"}, "speaker.compute_type: Input should be 'int8'"),
        ({"reward.similarity.engine": "policy"}, "a voice of rollout.family 'outetts' has no speaker encoder"),
        ({"assets.reference.files": {"speaker.json": "0" * 64}},
         "which compares with a clip, but assets.reference is speaker.json, a ready profile"),
        ({"grpo.sampling.repetition_penalty": 1.1}, "sampling.repetition_penalty is 1.1, GRPO needs 1 (off)"),
    ],
)
def test_bad_keys_of_this_family_are_told(changes: dict[str, Any], told: str) -> None:
    data = YAML(typ="safe").load(MICRO.read_text(encoding="utf-8"))
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = data
        for name in parents:
            section = section[name]
        section[last] = value
    with pytest.raises(ValueError) as caught:
        parse_params(data)
    assert told in str(caught.value)


def test_repetition_penalty_may_be_on_where_nothing_is_replayed() -> None:
    data = YAML(typ="safe").load(MICRO.read_text(encoding="utf-8"))
    data["evaluate"]["sampling"]["repetition_penalty"] = 1.1
    assert parse_params(data).evaluate.sampling.repetition_penalty == 1.1
    demo = YAML(typ="safe").load((ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8"))
    demo["evaluate"]["sampling"]["repetition_penalty"] = 1.1
    with pytest.raises(ValueError, match=r"evaluate\.sampling\.repetition_penalty is 1\.1, but .*qwen3_tts"):
        parse_params(demo)


def test_micro_recipe_names_the_files_that_are_there() -> None:
    assets = load_params(MICRO).assets
    for name in ("base", "prompts"):
        asset = getattr(assets, name)
        assert {file: sha256_file(ROOT / asset.path / file) for file in asset.files} == dict(asset.files)
