"""Frames of all live slots on a CPU, shared out over threads; the arithmetic stands in `cpu_loops.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.cpu_loops import DEPTH, QUAD, Net, Rows, Sampler, Stack, frames
from swaralign.policy.decoder import Cache, FusedDecoder
from swaralign.policy.slots import MIN_FRAMES, Slots, Tables


class CpuFrames:
    """Advances the slots of one rollout. Raises ValueError for layers that the loops' blocks do not divide."""

    def __init__(
        self, trunk: FusedDecoder, answerer: FusedDecoder, tables: Tables, slots: Slots, sampling: SamplingParams,
        predictor: PredictorParams,
    ) -> None:
        self.rows = Rows(*(getattr(slots, name).numpy() for name in Rows._fields))
        answers = answerer.new_cache(len(slots.alive), slots.codes.shape[2])
        self.arguments = (
            _stack(trunk, slots.cache), _stack(answerer, answers),
            _net(tables), self.rows,
            Sampler(float(sampling.temperature), sampling.top_k, float(sampling.top_p)),
            Sampler(float(predictor.temperature), predictor.top_k, float(predictor.top_p)),
        )
        self.threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.threads)

    def advance(self) -> None:
        """Samples frames for live slots until one of them ends; only then do threads wait for each other."""
        live = self.rows.alive.nonzero()[0]
        share = QUAD * -(-len(live) // (QUAD * self.threads))
        shares = [live[start : start + share] for start in range(0, len(live), share)]
        list(self.pool.map(lambda slots: frames(slots, len(live), *self.arguments), shares))


def _stack(decoder: FusedDecoder, cache: Cache) -> Stack:
    weights = {name: weight.numpy() for name, weight in vars(decoder.stacked).items()}
    odd = {name: weight.shape[1] for name, weight in weights.items() if name != "qk_norm" and weight.shape[1] % DEPTH}
    if odd:
        raise ValueError(f"on a CPU the inputs of every layer must be a multiple of {DEPTH}, but this checkpoint has "
                         f"{odd}; set runtime.device to cuda")
    cos, sin = (table.numpy() for table in decoder.rotary_tables(cache.keys.shape[3]))
    return Stack(
        **weights, keys=cache.keys.numpy(), values=cache.values.numpy(), cos=cos, sin=sin,
        floor=decoder.floor, head_floor=decoder.head_floor,
    )


def _net(tables: Tables) -> Net:
    tensors = {**vars(tables), "heads": torch.stack(tables.heads)}
    arrays = {name: tensors[name].numpy() for name in Net._fields if name not in ("eos", "min_frames")}
    return Net(**arrays, eos=tables.eos, min_frames=MIN_FRAMES)
