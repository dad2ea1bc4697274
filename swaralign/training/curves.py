"""Training curves: what a trainer logged, as a table with the field's names, and a progress bar that shows them."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from swaralign import artifacts

log = logging.getLogger(__name__)

# column of curves.csv -> key of the trainer's log; timings are left out, since they differ from run to run
GRPO_COLUMNS = {
    "step": "step",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "wer": "wer",
    "cer": "cer",
    "mos": "mos",
    "speaker_similarity": "speaker_similarity",
    "failed": "failed",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean",
    "truncated": "completions/clipped_ratio",
    "tokens_mean": "completions/mean_length",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Writes rows under the given columns, atomically; a value that a row lacks is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    artifacts.write_text(path, text.getvalue())


def curve_rows(history: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row an update from a trainer's log history; entries without a loss (its closing summary) are left out."""
    return [{name: entry.get(key) for name, key in columns.items()} for entry in history if "loss" in entry]


class Progress(TrainerCallback):
    """A bar over the updates with reward, KL, clip fraction and time left; warns when a reward has collapsed."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="updates", unit="update")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.bar is None or not logs or "loss" not in logs:
            return
        shown = {"reward": "reward", "kl": "kl", "clip": "clip_ratio/region_mean", "wer": "wer"}
        self.bar.set_postfix({name: f"{logs[key]:.4g}" for name, key in shown.items() if logs.get(key) is not None})
        self.bar.update(state.global_step - self.bar.n)
        flat = logs.get("frac_reward_zero_std", 0.0)
        if flat > 0.5:
            log.warning("update %d: %.0f %% of the groups have equal rewards and teach nothing; the reward has "
                        "collapsed", state.global_step, 100 * flat)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
