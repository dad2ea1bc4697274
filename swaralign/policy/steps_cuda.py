"""Single tokens through a decoder on a GPU, five kernels a layer, and whole steps as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swaralign.policy.decoder import BlockWeights, Cache, FusedDecoder
from swaralign.policy.kernels import Residual, attend


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Does what `step` does, by one launch. It is run once for that; whatever it reads and writes must stay in place.

    Without a GPU, where Triton's interpreter runs the kernels, it is `step` itself.
    """
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled here
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Steps:
    """A decoder with its cache, its residual stream and the buffers between its kernels."""

    def __init__(self, decoder: FusedDecoder, cache: Cache) -> None:
        self.decoder, self.cache = decoder, cache
        batch, first = cache.keys.shape[1], decoder.blocks[0]
        self.tables = decoder.rotary_tables(cache.keys.shape[3])
        self.stream = Residual(batch, first.qkv.shape[0], decoder.dtype, decoder.device, decoder.floor)
        sizes = (first.qkv.shape[1], first.output.shape[0], first.down.shape[0])
        self.qkv, self.mixed, self.gated = (
            torch.zeros(batch, size, dtype=decoder.dtype, device=decoder.device) for size in sizes
        )

    def step(self, table: Tensor, index: Tensor, position: Tensor) -> None:
        """Appends a token to every slot, up to the residual stream after the last layer.

        Its embedding is the row of `table` (n, D) that `index` (B,) names; `position` (B,), or (1,) for all.
        """
        self.stream.set(table, index)
        for layer, block in enumerate(self.decoder.blocks):
            self._block(block, position, self.cache.keys[layer], self.cache.values[layer])

    def _block(self, block: BlockWeights, position: Tensor, keys: Tensor, values: Tensor) -> None:
        floor = self.decoder.head_floor if self.decoder.norms_heads else None
        self.stream.read(block.qkv, self.qkv)
        attend(self.qkv, block.qk_norm, self.tables, position, keys, values, self.mixed, floor)
        self.stream.add(self.mixed, block.output)
        self.stream.read(block.gate_up, self.gated, gate=True)
        self.stream.add(self.gated, block.down)
