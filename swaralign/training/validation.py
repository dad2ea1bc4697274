"""Fixed validation: the same held-out prompts with the same draws, before the first update and every so many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Features, Value
from transformers import TrainerCallback

from swaralign import artifacts
from swaralign.evaluation import evaluate_takes, features, summarise
from swaralign.params import ValidationParams
from swaralign.policy.base import TrainableVoice
from swaralign.rewards.scorer import TakeScorer

log = logging.getLogger(__name__)
SUMMARY = ("composite", "wer_corpus", "wer_mean", "cer_corpus", "cer_mean", "mos", "speaker_similarity", "failed",
           "duration_s")  # what of a validation's summary goes into validation.csv and to a tracker


class FixedValidation(TrainerCallback):
    """Validates the policy in training, and keeps each step's takes in the run folder.

    A step that is already there is not sampled again, so a resumed run keeps what it had measured. Where several
    processes train, each samples a share of the prompts, and the first one keeps all. `reporter`: a tracker's callback
    that each validation's summary goes to. `weights`: what to sample within, where a process holds only a shard.
    """

    reporter: TrainerCallback | None = None
    weights: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self, policy: TrainableVoice, prompts: Sequence[dict[str, str]], params: ValidationParams,
        scorer: TakeScorer, folder: Path, batch_size: int,
    ) -> None:
        self.policy, self.scorer = policy, scorer
        self.prompts, self.params = list(prompts)[: params.prompts], params
        self.folder, self.batch_size = folder, batch_size

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._validate(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.params.every == 0 or state.global_step == state.max_steps:
            self._validate(args, state, control)

    def _validate(self, args: Any, state: Any, control: Any) -> None:
        path = self.folder / f"step-{state.global_step:06d}.parquet"
        if path.is_file() or not self.prompts:
            return
        processes = PartialState()
        with processes.split_between_processes(self.prompts) as share, self.weights():
            mine = evaluate_takes(
                self.policy, share, draws=1, seed=self.params.seed, sampling=self.params.sampling,
                scorer=self.scorer, batch_size=self.batch_size,
            )
        table = pa.concat_tables(gather_object([mine])).combine_chunks()
        if processes.is_main_process:
            self._keep(args, state, control, table, path)

    def _keep(self, args: Any, state: Any, control: Any, table: pa.Table, path: Path) -> None:
        artifacts.write_parquet(path, table)
        row = summarise(table)
        told = ("composite", "wer_corpus", "cer_corpus")
        log.info("validation at update %d: %s", state.global_step,
                 ", ".join(f"{name} {row[name]:.4f}" for name in told if row[name] is not None))
        if self.reporter:
            measured = {f"eval_{name}": row[name] for name in SUMMARY if row[name] is not None}
            self.reporter.on_log(args, state, control, logs=measured)

    def composites(self) -> dict[int, float]:
        """The mean composite of each validation so far, by its update."""
        return {_step(path): pc.mean(pq.read_table(path, columns=["composite"]).column(0)).as_py()
                for path in self.folder.glob("step-*.parquet")}

    def table(self) -> pa.Table:
        """Every validation take of the run, with the update it was sampled at in `step`."""
        parts = []
        for path in sorted(self.folder.glob("step-*.parquet")):
            part = pq.read_table(path)
            step = pa.array([_step(path)] * len(part), pa.int64())
            parts.append(part.add_column(0, "step", step))
        schema = Features({"step": Value("int64"), **features(self.policy.sample_rate_hz)}).arrow_schema
        return pa.concat_tables([schema.empty_table(), *(part.cast(schema) for part in parts)])


def _step(path: Path) -> int:
    return int(path.stem.split("-")[1])
