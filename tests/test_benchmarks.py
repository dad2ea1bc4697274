"""The benchmark of GRPO updates, and the random OuteTTS that it measures at full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.full_size_outetts import SHAPE, speaker, write_base
from benchmarks.full_size_whisper import write_whisper
from swaralign.assets import resolve
from swaralign.params import OuteTtsRolloutParams, RuntimeParams, SamplingParams, load_params
from swaralign.policy import load_policy
from tests.voices import TINY_WHISPER

PARTS = ("rollout", "decode", "reference", "forward", "backward")


@pytest.mark.parametrize(("recipe", "longest", "heard"), [("outetts-micro", 80, False), ("demo", 12, True)])
def test_updates_are_timed_part_by_part(
    recipe: str, longest: int, heard: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "benchmarks.update", str(tmp_path), "--recipe", f"recipes/{recipe}.yaml",
               "--size", "micro", "--device", "cpu", "--threads", "1", "--validation", "2", "--longest", str(longest)]
    if heard:
        tokenizer = resolve("asr", load_params(root / "recipes/demo.yaml").assets) / "tokenizer.json"
        write_whisper(tmp_path / "whisper", tokenizer, 0, TINY_WHISPER)
        monkeypatch.setenv("SWARALIGN_CACHE", str(tmp_path / "cache"))
        command += ["--asr", str(tmp_path / "whisper")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert all(figures[part] > 0 for part in PARTS) and {"score", "optimizer"} <= figures.keys()
    assert sum(figures[part] for part in PARTS) <= figures["update_s"] + 0.01
    assert figures["validation_s"] > 0 and figures["validation_takes"] == 2
    assert figures["kl_at_start"] == pytest.approx(0, abs=1e-5) and figures["clipped_at_start"] == 0
    assert figures["score"] > 0.01 if heard else figures["score"] < figures["rollout"]
    assert 0 < figures["reward"] < 1 and figures["follows_weights"] is True


def test_random_outetts_says_pairs_of_codes_until_its_budget(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    small = {**SHAPE, "vocab_size": 16_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    write_base(tmp_path / "base", 0, small, {"codes": 1024, "encoder": 4, "decoder": 32})
    settings = OuteTtsRolloutParams(family="outetts", base_tokens=1, tokens_per_text_token=10.0, max_tokens=4096,
                                    batch_size=4)
    voice = load_policy(tmp_path / "base", speaker(tmp_path / "base"), settings, RuntimeParams(device="cpu", threads=1))
    sampling = SamplingParams(temperature=0.7, top_k=0, top_p=1.0)
    takes = voice.rollout(["The bakery opens early."] * 4, range(4), sampling)
    for take, wave in zip(takes, voice.decode(takes), strict=True):
        assert take.truncated and len(take.completion_ids) == 51  # five text tokens: four words and a full stop
        assert take.frames >= 20 and len(wave) == 320 * take.frames - 8
