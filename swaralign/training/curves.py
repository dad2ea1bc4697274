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

_PREFERENCE_COLUMNS = {
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "chosen_logps": "logps/chosen",
    "rejected_logps": "logps/rejected",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}
# rewards are beta x log-ratio of policy to reference; accuracy is the share of pairs with a positive margin
DPO_COLUMNS = {"step": "step", "loss": "loss", "margin": "rewards/margins", "accuracy": "rewards/accuracies",
               **_PREFERENCE_COLUMNS}
KTO_COLUMNS = {"step": "step", "loss": "loss", "margin": "rewards/margins", "kl": "kl", **_PREFERENCE_COLUMNS}


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
    """A bar over the updates with time left and what is `shown`; warns when a reward has collapsed.

    `shown`: names on the bar with their keys in the trainer's log.
    """

    def __init__(self, shown: Mapping[str, str]) -> None:
        self.shown = shown
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="updates", unit="update")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.bar is None or not logs or "loss" not in logs:
            return
        values = {name: logs.get(key) for name, key in self.shown.items()}
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in values.items() if value is not None},
                             refresh=False)
        self.bar.update(state.global_step - self.bar.n)
        flat = logs.get("frac_reward_zero_std", 0.0)
        if flat > 0.5:
            log.warning("update %d: %.0f %% of the groups have equal rewards and teach nothing; the reward has "
                        "collapsed", state.global_step, 100 * flat)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
