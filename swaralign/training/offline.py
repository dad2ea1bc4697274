"""What DPO and KTO share: rows of token ids in a planned order, and masks that keep the policy's own tokens."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import Trainer

from swaralign.params import RuntimeParams
from swaralign.seeds import take_seed

log = logging.getLogger(__name__)
MANIFEST = "manifest.json beside it counts what was dropped and why"


class PlannedRows(Trainer):
    """What both trainers change of TRL's: rows are token ids already, and come in an order that lasts the whole run.

    TRL would make ids from text, and a sampled completion need not survive the way to text and back. `plan`: indices
    into the rows, an update after another; with one epoch as long as the run, resuming never replays its order.
    """

    def __init__(self, plan: Sequence[int], **arguments: Any) -> None:
        self.plan = plan
        super().__init__(**arguments)

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.plan


class PolicyTokens:
    """A collator of TRL's whose completion masks keep only the tokens that the policy chose.

    `masks`: each mask's name in a batch, with the columns of the completions that it covers, one after another.
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], dict[str, Any]],
        policy_mask: Callable[[np.ndarray], np.ndarray],
        masks: Mapping[str, Sequence[str]],
    ) -> None:
        self.collator, self.policy_mask, self.masks = collator, policy_mask, masks

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        for name, columns in self.masks.items():
            completions = [(len(row["prompt_ids"]), row[column]) for column in columns for row in rows]
            for mask, (start, ids) in zip(batch[name], completions, strict=True):
                mask[start : start + len(ids)] *= torch.from_numpy(self.policy_mask(np.asarray(ids)))
        return batch


def read_rows(path: Path, wanted: int, key: str) -> list[dict[str, Any]]:
    """The rows of a preference set. Raises ValueError if they are fewer than one update's `wanted`, the param `key`."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    if len(rows) < wanted:
        raise ValueError(f"{path} holds {len(rows)} rows, {key} is {wanted}: not enough for one update; lower it, or "
                         f"make more candidates ({MANIFEST})")
    return rows


def plan_epochs(count: int, wanted: int, seed: int) -> list[int]:
    """`wanted` indices below `count`: whole epochs after another, the first in order, each later one shuffled.

    The first is in order so that the first update sees the very batches that the reference was computed on.
    """
    plan = list(range(count))
    epoch = 0
    while len(plan) < wanted:
        epoch += 1
        plan += shuffled(range(count), seed, epoch)
    return plan[:wanted]


def shuffled(items: Sequence[Any], seed: int, epoch: int) -> list[Any]:
    """The items in the order of one epoch of a run."""
    order = list(items)
    random.Random(take_seed(seed, "epoch", epoch)).shuffle(order)
    return order


def start_bound(runtime: RuntimeParams) -> float:
    """How far from 0 rounding may put a take's log-ratio to its reference, in nats: bfloat16 on a GPU, else float32."""
    return 1e-3 if runtime.device == "cpu" else 0.5
