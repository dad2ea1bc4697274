"""What a rollout keeps: prompts, finished takes, slots that speak side by side, the tables around the decoders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from swaralign.policy.decoder import Cache
from swaralign.policy.sampling import uniforms

MIN_FRAMES = 2  # the official sampler never ends a take before two frames
Taken = TypeVar("Taken")
Ids = TypeVar("Ids", bound=Hashable)  # of a prompt
SPECIAL_IDS = 1024  # the talker's last ids: control tokens, none of them a code


def suppressed_ids(vocab_size: int, eos_id: int) -> list[int]:
    """Codec ids that the official sampler never draws: the special ones but for the end of speech."""
    return [i for i in range(vocab_size - SPECIAL_IDS, vocab_size) if i != eos_id]


@dataclass(frozen=True)
class Prompt:
    """One row to roll out: prefill ids, the frame budget and the draw's seed."""

    text: Sequence[int]
    codec: Sequence[int]
    budget: int
    seed: int


@dataclass(frozen=True)
class Frames:
    """A finished take: frames (n, 16) int64 and whether the policy ended it itself.

    `log_probs`: float32, of each token that the policy chose (n, and one more for the end of speech), under the
    whole softmax at the sampling temperature, before top-k and top-p.
    """

    codes: np.ndarray
    ended: bool
    log_probs: np.ndarray


@dataclass(frozen=True)
class Tables:
    """What stands around the two decoders, matrices for `x @ W`: V talker ids, W codes a residual book, widths D, P.

    `head` (D, V) and its `bias` (2, V), the first row for the frames before which no take may end; `state` (D, P) and
    `state_bias` (P,) hand the talker's state to the predictor; `first_input` (V, P) and `inputs` (books - 2, W, P)
    are codes as the predictor reads them, `heads` its books - 1 heads (P, W); `first_embedding` (V, D),
    `embeddings` (books - 1, W, D) and `pad` (D,) add up to the talker's next input.
    """

    head: Tensor
    bias: Tensor
    state: Tensor
    state_bias: Tensor
    first_input: Tensor
    inputs: Tensor
    heads: list[Tensor]
    first_embedding: Tensor
    embeddings: Tensor
    pad: Tensor
    eos: int


@dataclass(frozen=True)
class Slots:
    """The state of B takes that are spoken side by side; a slot whose take has finished waits for the next one.

    `x` (B, D) float32: the residual stream whose state chooses the next frame. `position` (B,): of the next token.
    `step`, `budget` (B,): frames so far, and at most. `alive`, `ended` (B,) bool. `uniform` (B, F + 1, 16): the take's
    draws. `codes` (B, F + 1, 16) and `log_probs` (B, F + 1): what was sampled, the end included.
    """

    cache: Cache
    x: Tensor
    position: Tensor
    step: Tensor
    budget: Tensor
    alive: Tensor
    ended: Tensor
    uniform: Tensor
    codes: Tensor
    log_probs: Tensor

    @classmethod
    def new(cls, cache: Cache, width: int, frames: int, books: int) -> Slots:
        """Slots that hold nothing yet, for takes of at most so many frames."""
        batch, device = cache.keys.shape[1], cache.keys.device
        count, flag = (torch.zeros(batch, dtype=dtype, device=device) for dtype in (torch.int64, torch.bool))
        return cls(
            cache=cache,
            x=torch.zeros(batch, width, device=device),
            position=count, step=count.clone(), budget=count.clone(), alive=flag, ended=flag.clone(),
            uniform=torch.zeros(batch, frames + 1, books, device=device),  # an ended take is drawn for once more
            codes=torch.zeros(batch, frames + 1, books, dtype=torch.int64, device=device),
            log_probs=torch.zeros(batch, frames + 1, device=device),
        )

    def begin(self, free: Sequence[int], budgets: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts a take in each of these slots, whose prompt has been read."""
        where = torch.tensor(free, device=self.x.device)
        frames, books = self.uniform.shape[1] - 1, self.uniform.shape[2]
        self.budget[where] = torch.tensor(budgets).to(where.device)
        self.uniform[where, :frames] = uniforms(seeds, frames, books).to(where.device)
        self.step[where], self.alive[where], self.ended[where] = 0, True, False

    def take(self, slot: int) -> Frames:
        """The finished take of a slot."""
        count, ended = int(self.step[slot]), bool(self.ended[slot])
        log_probs = self.log_probs[slot, : count + int(ended)]
        return Frames(self.codes[slot, :count].cpu().numpy().copy(), ended, log_probs.cpu().numpy().copy())


def distinct(
    prompts: Sequence[Ids], free: Sequence[int], size: int, device: torch.device
) -> Iterator[tuple[list[Ids], Tensor, Tensor]]:
    """Prompts that go into slots, alike ones once: at most `size` of them, the rows (m,) that slots (m,) take."""
    slots_of: dict[Ids, list[int]] = {}
    for slot, prompt in zip(free, prompts, strict=True):
        slots_of.setdefault(prompt, []).append(slot)
    groups = list(slots_of.items())
    for start in range(0, len(groups), size):
        chosen = groups[start : start + size]
        row = [row for row, (_, slots) in enumerate(chosen) for _ in slots]
        where = [slot for _, slots in chosen for slot in slots]
        yield [ids for ids, _ in chosen], torch.tensor(row, device=device), torch.tensor(where, device=device)


def serve(
    count: int, slots: Slots, fill: Callable[[list[int], list[int]], None], advance: Callable[[], None],
    take: Callable[[int], Taken],
) -> list[Taken]:
    """Samples `count` prompts, begun in the order of their numbers: a take that ends makes room for the next.

    `fill` puts the prompts of these numbers (second) into these slots (first); `advance` samples for a while; `take`
    reads what a slot has finished.
    """
    waiting = deque(range(count))
    owners: list[int | None] = [None] * len(slots.alive)
    takes: dict[int, Taken] = {}
    while len(takes) < count:
        free = [slot for slot, owner in enumerate(owners) if owner is None][: len(waiting)]
        chosen = [waiting.popleft() for _ in free]
        if free:
            fill(free, chosen)
        for slot, index in zip(free, chosen, strict=True):
            owners[slot] = index
        advance()
        for slot, alive in enumerate(slots.alive.tolist()):
            owner = owners[slot]
            if owner is not None and not alive:
                takes[owner], owners[slot] = take(slot), None
    return [takes[index] for index in range(count)]
