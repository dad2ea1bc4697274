"""The diagnostics commands: what they compute, and that they run on the micro voice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swaralign.cli import main
from swaralign.diagnostics import snr_db, worst_prompts


def test_snr_is_power_over_the_difference() -> None:
    wave = np.array([1.0, -1.0, 1.0, -1.0], np.float32)
    assert snr_db(wave, 0.9 * wave) == pytest.approx(20.0, abs=1e-5)
    assert snr_db(wave, wave[:3]) == float("inf")


def write_scores(folder: Path, rows: Sequence[tuple[str, int, float | None]], sound: bytes | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    audio = None if sound is None else {"bytes": sound, "path": None}
    table = [{"id": name, "text": f"text {name}", "draw": draw, "wer": wer, "audio": audio} for name, draw, wer in rows]
    pq.write_table(pa.Table.from_pylist(table), folder / "scores.parquet")


def test_samples_are_of_the_prompts_that_the_start_says_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", 0, 0.2), ("a", 1, 0.2), ("b", 0, 0.0), ("b", 1, 0.9), ("c", 0, 0.2), ("c", 1, 0.2)]
    write_scores(tmp_path / "data/evaluate/sft", rows, b"start")
    write_scores(tmp_path / "data/evaluate/dpo", rows, b"dpo")
    scores = tmp_path / "data/evaluate/sft/scores.parquet"
    assert [(name, round(wer, 3)) for name, _, wer in worst_prompts(scores, 3)] == [("b", 0.45), ("a", 0.2), ("c", 0.2)]
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "samples", "--prompts", "2"]) == 0
    written = {path.relative_to(tmp_path / "results/samples").as_posix(): path.read_bytes()
               for path in (tmp_path / "results/samples").rglob("*.*")}
    assert written == {"b/sft.flac": b"start", "b/dpo.flac": b"dpo", "b/text.txt": b"text b\n",
                       "a/sft.flac": b"start", "a/dpo.flac": b"dpo", "a/text.txt": b"text a\n"}


def test_a_voice_without_the_prompt_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scores(tmp_path / "data/evaluate/sft", [("a", 0, 0.2)], b"start")
    write_scores(tmp_path / "data/evaluate/dpo", [("b", 0, 0.2)], b"dpo")
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "samples", "--prompts", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "results/samples/a").iterdir()) == ["sft.flac", "text.txt"]


def test_takes_without_transcripts_have_no_worst_ones(tmp_path: Path) -> None:
    write_scores(tmp_path, [("a", 0, None)], b"start")
    with pytest.raises(ValueError, match="has no WER of a: the scorer gave no transcripts"):
        worst_prompts(tmp_path / "scores.parquet", 1)


def test_what_is_not_there_is_named(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_bytes((root / "recipes" / "outetts-micro.yaml").read_bytes())
    assert main(["diagnose", "samples"]) == 1
    assert "scores.parquet does not exist; `dvc repro evaluate` makes it" in capsys.readouterr().err
    assert main(["diagnose", "codec", str(root / "data/demo/reference.flac"), "text"]) == 1
    assert "embedding.json does not exist; `dvc repro speaker`" in capsys.readouterr().err
