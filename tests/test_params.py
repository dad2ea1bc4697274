"""Params: every kind of fault gets one line that names the key, the value and what would do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from swaralign.params import Params, load_params, parse_params

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def put(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Set a dotted key of a nested mapping."""
    *parents, last = key.split(".")
    section = data
    for name in parents:
        section = section[name]
    section[last] = value
    return data


@pytest.fixture
def data(demo: dict[str, Any]) -> dict[str, Any]:
    """The demo with the numbers that the messages below quote, so that tuning the demo does not touch them."""
    demo["split"] |= {"window_rows": 240, "expected_train": 200, "held_out": 100, "max_duration_s": 14.0}
    demo["grpo"] |= {"prompts_per_update": 8, "samples_per_prompt": 8, "micro_batch": 16, "iterations": 1}
    demo["grpo"]["schedule"] |= {"updates": 12, "save_every": 4}
    demo["grpo"]["validation"]["prompts"] = 32
    demo["evaluate"]["prompts"] = 100
    demo["candidates"] |= {"prompts": 64, "temperatures": [0.7, 0.9, 1.0, 1.2], "per_temperature": 1}
    demo["preferences"]["pairs"]["strategy"] = "max_margin"
    demo["dpo"] |= {"pairs_per_update": 16, "micro_batch": 16}
    demo["kto"] |= {"takes_per_update": 32, "micro_batch": 16}
    return demo


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_loads(recipe: Path) -> None:
    assert isinstance(load_params(recipe), Params)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        # unknown keys, with the nearest valid one and all of them
        ("grpo.learning_rte", 1.0, ["grpo.learning_rte: unknown key", "valid keys here: seed, prompts_per_update"]),
        ("grpo.schedule.update", 1, ["grpo.schedule.update: unknown key", "did you mean 'updates'?"]),
        ("evalute", {}, ["evalute: unknown key", "did you mean 'evaluate'?"]),
        ("assets.base.pth", "x", ["assets.base.pth: unknown key", "did you mean 'path'?"]),
        # mistyped values
        ("split.window_rows", "240", ["split.window_rows:", "valid integer", "'240'"]),
        ("split.window_rows", 240.5, ["split.window_rows:", "valid integer", "240.5"]),
        ("grpo.scale_by_std", "yes", ["grpo.scale_by_std:", "valid boolean", "'yes'"]),
        ("grpo.beta", None, ["grpo.beta:", "valid number", "None"]),
        ("grpo.beta", "1e-2", ["grpo.beta:", "valid number", "'1e-2'"]),
        ("reward", 3, ["reward:", "found 3"]),
        # out of range
        ("grpo.samples_per_prompt", 1, ["grpo.samples_per_prompt:", "greater than or equal to 2", "found 1"]),
        ("grpo.sampling.temperature", 0.0, ["grpo.sampling.temperature:", "greater than 0", "found 0.0"]),
        ("rollout.predictor.top_p", 1.5, ["rollout.predictor.top_p:", "less than or equal to 1", "found 1.5"]),
        ("reward.asr.window_s", 5.0, ["reward.asr.window_s:", "greater than or equal to 8", "found 5.0"]),
        ("reward.metric", "mos", ["reward.metric:", "'cer' or 'wer'", "'mos'"]),
        ("runtime.device", "gpu", ["runtime.device:", "'cpu' or 'cuda'", "'gpu'"]),
        ("assets.reference.files", {"reference.flac": "15a9"}, ["assets.reference.files.reference.flac:", "'15a9'"]),
        ("assets.base.source", "web", ["assets.base:", "'web'", "'local', 'package', 'hub'"]),
        ("grpo.schedule.learning_rate", float("inf"), ["grpo.schedule.learning_rate:", "finite number"]),
        ("split.min_snr_db", float("nan"), ["split.min_snr_db:", "finite number"]),
        ("grpo.schedule.keep_checkpoints", 1, ["grpo.schedule.keep_checkpoints:", "greater than or equal to 2"]),
        ("grpo.seed", 2**32, ["grpo.seed:", "less than 4294967296"]),
        # keys that do not go together
        ("grpo.lora.dropout", 0.1, ["grpo:", "lora.dropout is 0.1, GRPO needs 0"]),
        ("grpo.micro_batch", 24, ["grpo:", "micro_batch 24 does not divide the 64 takes", "[1, 2, 4, 8, 16, 32, 64]"]),
        ("grpo.num_processes", 5, ["grpo:", "num_processes 5 does not divide the 64 takes", "[1, 2, 4, 8, 16, 32"]),
        ("grpo.num_processes", 8, ["grpo:", "micro_batch 16 x num_processes 8 does not divide the 64 takes",
                                   "micro_batch could be one of [1, 2, 4, 8]"]),
        ("grpo.sharding", "fsdp", ["grpo:", "sharding fsdp is for trainable full over 2", "set sharding to none"]),
        ("grpo.schedule.keep_every", 6, ["grpo.schedule:", "keep_every 6 is not a multiple of save_every 4",
                                         "8 would do"]),
        ("kto.micro_batch", 5, ["kto:", "micro_batch 5 does not divide takes_per_update 32", "[2, 4, 8, 16, 32]"]),
        ("grpo.micro_batch", 10**15, ["grpo:", "micro_batch 1000000000000000 does not divide"]),
        ("dpo.pairs_per_update", 10**9 + 1, ["dpo:", "micro_batch 16 does not divide", "[1, 7, 11, "]),
        ("reward.http.urls", ["http://127.0.0.1:99999"], ["reward.http.urls.0: http://127.0.0.1:99999 is not a URL"]),
        ("reward.http.urls", ["http://::1:18080"], ["reward.http.urls.0: http://::1:18080 is not the URL of a"]),
        ("reward.http.urls", ["http://[::1"], ["reward.http.urls.0: http://[::1 is not a URL: Invalid IPv6 URL"]),
        ("reward.http.urls", ["127.0.0.1:18080"], ["reward.http.urls.0: 127.0.0.1:18080 is not the URL of a scorer"]),
        ("reward.http.urls", ["http://b\u00fccher.de"], ["reward.http", "is not the URL of a scorer; as http://127.0.0.1"]),
        ("grpo.iterations", 5, ["grpo:", "schedule.updates 12 is not a multiple of iterations 5", "10 would do"]),
        ("grpo.iterations", 3, ["grpo:", "schedule.save_every 4 is not a multiple of iterations 3", "3 would do"]),
        ("rollout.max_frames", 101,
         ["rollout.max_frames 101 can hold 8.08 s", "reward.asr.window_s 8.0", "100 would do"]),
        ("split.min_duration_s", 15.0, ["split:", "min_duration_s 15.0 is above max_duration_s 14.0"]),
        ("split.expected_train", 241, ["split:", "expected_train 241 is above window_rows 240"]),
        ("grpo.validation.prompts", 101, ["grpo.validation.prompts is 101", "split.held_out keeps only 100"]),
        ("evaluate.prompts", 101, ["evaluate.prompts is 101", "split.held_out keeps only 100"]),
        ("grpo.prompts_per_update", 400, ["grpo.prompts_per_update is 400", "split.expected_train is 200"]),
        ("preferences.pairs", {"strategy": "top_k_vs_bottom_k", "k": 3, "min_margin": 0.0},
         ["preferences.pairs.k 3 needs 6 takes of a prompt, but candidates samples 4", "k 2 would do"]),
        ("dpo.pairs_per_update", 96, ["dpo.pairs_per_update is 96, but 64 prompts with 4 takes", "at most 64 pairs"]),
        ("kto.takes_per_update", 288, ["kto.takes_per_update is 288, but 64 prompts", "at most 256 takes"]),
        ("assets.asr.parts", {}, ["assets.asr:", "files and parts must name the same files", "model.bin"]),
    ],
)
def test_bad_key_is_told(data: dict[str, Any], key: str, value: Any, told: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_params(put(data, key, value), "params.yaml")
    message = str(caught.value)
    assert message.startswith("params.yaml is not valid:")
    assert [part for part in told if part not in message] == [], message


@pytest.mark.parametrize("trainer", ["dpo", "kto", "grpo"])
def test_the_best_checkpoint_is_one_that_is_saved(data: dict[str, Any], trainer: str) -> None:
    put(data, f"{trainer}.schedule", data[trainer]["schedule"] | {"keep_best": True, "save_every": 4, "updates": 12})
    put(data, f"{trainer}.validation", data[trainer]["validation"] | {"every": 6, "prompts": 8})
    with pytest.raises(ValueError, match=rf"{trainer}: validation\.every 6 is not .*save_every 4: .*8 would do"):
        parse_params(data)
    for changes in ({"every": 8}, {"prompts": 0}):
        parse_params(put(data, f"{trainer}.validation", data[trainer]["validation"] | {"every": 6} | changes))


def test_missing_section_and_missing_key_are_told_together(demo: dict[str, Any]) -> None:
    del demo["reward"]
    del demo["grpo"]["beta"]
    with pytest.raises(ValueError) as caught:
        parse_params(demo)
    assert str(caught.value).splitlines()[1:] == ["  reward: missing", "  grpo.beta: missing"]


def test_every_section_is_needed(demo: dict[str, Any]) -> None:
    for section in list(demo):
        rest = {name: keys for name, keys in demo.items() if name != section}
        with pytest.raises(ValueError, match=rf"{section}: missing"):
            parse_params(rest)


def test_params_cannot_be_changed(demo: dict[str, Any]) -> None:
    params = parse_params(demo)
    with pytest.raises(ValueError, match="frozen"):
        params.grpo.beta = 1.0  # type: ignore[misc]


def test_file_that_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("grpo: [1, 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?s)params\.yaml is not valid YAML: .*line 2"):
        load_params(path)


@pytest.mark.parametrize(("content", "told"), [
    (b"grpo: caf\xe9\n", "can't decode byte 0xe9"),
    (b"day: 2024-13-45\n", "month must be in 1..12"),
    (b"a: " + b"[" * 3000, "maximum recursion depth"),
], ids=["Latin-1", "no date", "deep"])
def test_file_that_yaml_cannot_make_sense_of_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s)params\.yaml is not valid YAML: .*{told}"):
        load_params(path)


def test_key_given_twice_is_not_taken_silently(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "params.yaml"
    text = (root / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    path.write_text(text + "\nmerge:\n  scale: 2.0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?s)params\.yaml is not valid YAML: .*duplicate key \"merge\""):
        load_params(path)


@pytest.mark.parametrize(("text", "kind"), [("", "NoneType"), ("- 1\n", "list"), ("42\n", "int")])
def test_file_that_is_no_mapping(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"must be a mapping of sections, found {kind}"):
        load_params(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.yaml does not exist"):
        load_params(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_libyaml_can_read_it(recipe: Path) -> None:
    """DVC reads params.yaml too, and by YAML 1.1 where ruamel.yaml.clib is installed."""
    assert yaml.safe_load(recipe.read_text(encoding="utf-8"))["reward"]["http"]["urls"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_key_has_a_comment(recipe: Path) -> None:
    """On its own line; a key that all assets share is explained at the first one, pinned files need no words."""
    assert uncommented_keys(recipe.read_text(encoding="utf-8")) == []


def test_an_uncommented_key_is_found() -> None:
    grpo = "grpo: # training\n  seed: 1 # of draws\n  beta: 0.1\n"
    assets = "assets: # outside\n  base: # voice\n    files: # pins\n      a: 1f\n  asr: # recogniser\n    files:\n"
    assert uncommented_keys(grpo + assets) == ["grpo.beta"]


def uncommented_keys(text: str) -> list[str]:
    """Dotted keys of a params file whose line has no comment."""
    path: list[str] = []
    explained, bare = set(), []
    for line in text.splitlines():
        found = re.match(r"( *)([\w./-]+):(.*)$", line)
        if not found:
            continue
        path = [*path[: len(found[1]) // 2], found[2]]
        if path[0] == "assets" and len(path) > 3:  # a pinned file
            continue
        key = f"assets.*.{path[2]}" if path[0] == "assets" and len(path) == 3 else ".".join(path)
        if " # " in found[3]:
            explained.add(key)
        elif key not in explained:
            bare.append(key)
    return bare
