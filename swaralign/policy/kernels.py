"""The kernels of a frame, or a token, on a GPU, for some thirty operations a layer that would each cost a launch.

Activations between kernels and the cache have the weights' type, the residual stream and all sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# From Hopper on a kernel may start before the one before it has ended.
EARLY = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
LAUNCH: dict[str, Any] = {"launch_pdl": True} if EARLY else {}
PART = 16  # columns of the residual stream that one program adds to


@triton.jit
def _await(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until all before this one have written: what comes earlier may overlap."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _fetch(pointers):
    """Asks for the cache lines at these addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _matmul(
    x_ptr, w_ptr, out_ptr, copy_ptr, squares_ptr, rows, floor,
    K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside, live = n < N, m < rows
    product, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    w_at = w_ptr + n[:, None] * K + k[None, :]
    if EARLY:  # weights come while the kernels before still run
        line = w_ptr + tl.minimum(n, N - 1)[:, None] * K + tl.arange(0, max(BK // 64, 1))[None, :] * 64
        for start in range(0, K, BK):
            _fetch(line + start)
            if GATE:
                _fetch(line + N * K + start)
    _await(EARLY)
    for start in range(0, K, BK):
        x = tl.load(x_ptr + m[:, None] * K + start + k[None, :], mask=live[:, None], other=0.0)
        w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        product = tl.dot(x, tl.trans(w), product, input_precision="ieee")
        if GATE:
            w = tl.load(w_at + N * K + start, mask=inside[:, None], other=0.0)
            up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
    if NORM:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        here = (part < PARTS)[:, None] & live[None, :]
        squares = tl.sum(tl.load(squares_ptr + part[:, None] * rows + m[None, :], mask=here, other=0.0), axis=0)
        scale = 1 / tl.sqrt(squares + floor * floor)
        product *= scale[:, None]
        up *= scale[:, None]
    if GATE:
        product = product * tl.sigmoid(product) * up
    at, mask = m[:, None] * N + n[None, :], live[:, None] & inside[None, :]
    if ADD:
        product += tl.load(out_ptr + at, mask=mask, other=0.0)
        tl.store(copy_ptr + at, product.to(copy_ptr.dtype.element_ty), mask=mask)
        square = tl.sum(tl.where(mask, product * product, 0.0), axis=1)
        tl.store(squares_ptr + tl.program_id(0) * rows + m, square, mask=live)
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty), mask=mask)


class Residual:
    """The residual stream (B, D) of one decoder's slots: float32, a copy in the weights' type, and sums of squares,
    in parts, that whoever reads it norms by."""

    def __init__(self, batch: int, width: int, dtype: torch.dtype, device: torch.device, floor: float) -> None:
        self.total = torch.zeros(batch, width, device=device)
        self.copy = torch.zeros(batch, width, dtype=dtype, device=device)
        self.squares = torch.zeros(triton.cdiv(width, PART), batch, device=device)
        self.floor = floor

    def set(self, table: Tensor, index: Tensor) -> None:
        """Starts afresh: each row from the row of `table` (n, D) that `index` (B,) names."""
        batch, width = self.total.shape
        _set[(batch,)](
            table, index, index.stride(0), self.total, self.copy, self.squares, batch, D=width,
            BD=triton.next_power_of_2(width), PARTS=len(self.squares), EARLY=EARLY, num_warps=4, **LAUNCH,
        )

    def read(self, w: Tensor, out: Tensor, gate: bool = False) -> Tensor:
        """The normed stream times `w` (D, N), the latter stored by column, into `out` (B, N).

        `gate`: `w` is gate and up side by side, and `out` is silu(x gate) * (x up).
        """
        self._multiply(self.copy, out, w, 32, 4096 if gate else 8192, NORM=True, GATE=gate, ADD=False)
        return out

    def add(self, x: Tensor, w: Tensor) -> None:
        """Adds `x` (B, K), of the weights' type, times `w` (K, D), the latter stored by column."""
        self._multiply(x, self.total, w, PART, 16384, NORM=False, GATE=False, ADD=True)

    def _multiply(self, x: Tensor, out: Tensor, w: Tensor, width: int, tile: int, **kind: bool) -> None:
        (rows, inner), columns = x.shape, out.shape[1]
        height = min(64, max(16, triton.next_power_of_2(rows)))
        depth = min(inner & -inner, max(128, tile // height))
        _matmul[(triton.cdiv(columns, width), triton.cdiv(rows, height))](
            x, w, out, self.copy, self.squares, rows, self.floor, K=inner, N=columns, PARTS=len(self.squares),
            BM=height, BN=width, BK=depth, EARLY=EARLY, num_warps=4, num_stages=4, **kind, **LAUNCH,
        )


@triton.jit
def _set(
    table_ptr, index_ptr, stride, total_ptr, copy_ptr, squares_ptr, rows,
    D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0), tl.arange(0, BD)
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    _await(EARLY)
    place = tl.load(index_ptr + row * stride)
    x = tl.load(table_ptr + place * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * D + d, x, mask=d < D)
    tl.store(copy_ptr + row * D + d, x.to(copy_ptr.dtype.element_ty), mask=d < D)
    tl.store(squares_ptr + part * rows + row, tl.where(part == 0, tl.sum(x * x), 0.0), mask=part < PARTS)


@triton.jit
def _attend(
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, keys_ptr, values_ptr, out_ptr, floor, length,
    KV: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, SAME: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    place, size = tl.program_id(0), 2 * HALF
    g, low, full = tl.arange(0, 16), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    part = qkv_ptr + place * (GROUPS + 2) * size
    keys, values = keys_ptr + place * length * size, values_ptr + place * length * size
    _await(EARLY)
    position = tl.load(position_ptr if SAME else position_ptr + place // KV).to(tl.int32)
    # Queries and, in row GROUPS, the key: all are scaled and rotated alike.
    at, real = g[:, None] * size + low[None, :], (g <= GROUPS)[:, None]
    first = tl.load(part + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(part + at + HALF, mask=real, other=0.0).to(tl.float32)
    if NORM:
        scale = 1 / tl.sqrt(tl.sum(first * first + second * second, axis=1) + floor * floor)
        first *= scale[:, None]
        second *= scale[:, None]
    first *= tl.load(norm_ptr + at, mask=real, other=0.0)
    second *= tl.load(norm_ptr + at + HALF, mask=real, other=0.0)
    cos = tl.load(cos_ptr + position * HALF + low)[None, :]
    sin = tl.load(sin_ptr + position * HALF + low)[None, :]
    q_low, q_high = first * cos - second * sin, second * cos + first * sin
    k_low = tl.sum(tl.where((g == GROUPS)[:, None], q_low, 0.0), axis=0)
    k_high = tl.sum(tl.where((g == GROUPS)[:, None], q_high, 0.0), axis=0)
    value = tl.load(part + (GROUPS + 1) * size + full)
    tl.store(keys + position * size + low, k_low.to(keys_ptr.dtype.element_ty))
    tl.store(keys + position * size + HALF + low, k_high.to(keys_ptr.dtype.element_ty))
    tl.store(values + position * size + full, value)
    top = tl.sum(q_low * k_low[None, :] + q_high * k_high[None, :], axis=1)
    total, mixed = tl.full((16,), 1.0, tl.float32), tl.zeros((16, 2 * HALF), tl.float32) + value.to(tl.float32)[None, :]
    q_low, q_high = q_low.to(keys_ptr.dtype.element_ty), q_high.to(keys_ptr.dtype.element_ty)
    for start in range(0, position, BT):
        t = start + tl.arange(0, BT)
        seen = (t < position)[:, None]
        low_keys = tl.load(keys + t[:, None] * size + low[None, :], mask=seen, other=0.0)
        high_keys = tl.load(keys + t[:, None] * size + HALF + low[None, :], mask=seen, other=0.0)
        v = tl.load(values + t[:, None] * size + full[None, :], mask=seen, other=0.0)
        score = tl.dot(q_low, tl.trans(low_keys), input_precision="ieee")
        score = tl.dot(q_high, tl.trans(high_keys), score, input_precision="ieee")
        score = tl.where((t < position)[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        share, kept = tl.exp(score - higher[:, None]), tl.exp(top - higher)
        total = total * kept + tl.sum(share, axis=1)
        mixed = tl.dot(share.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
        top = higher
    out_at = out_ptr + (place * GROUPS + g)[:, None] * size + full[None, :]
    tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=(g < GROUPS)[:, None])


def attend(
    qkv: Tensor, norm: Tensor, tables: tuple[Tensor, Tensor], position: Tensor, keys: Tensor, values: Tensor,
    out: Tensor, floor: float | None,
) -> None:
    """One new token a row: scales and rotates queries and keys, writes the cache, attends to what stands there.

    `qkv` (B, KV (G + 2) d) and `norm` (G + 1, d) as in `decoder.BlockWeights`, G at most 15, d a power of two from 32;
    `tables` cosines and sines; `position` (B,), or (1,) for all rows; `keys`, `values` (B, KV, length, d); `out`
    (B, KV G d); `floor` None: queries and keys are only multiplied by `norm`.
    """
    batch, kv_heads, length, size = keys.shape
    _attend[(batch * kv_heads,)](
        qkv, norm, *tables, position, keys, values, out, floor or 0.0, length, KV=kv_heads, GROUPS=len(norm) - 1,
        HALF=size // 2, BT=16 if length <= 16 else 64, SAME=len(position) == 1, NORM=floor is not None, EARLY=EARLY,
        num_warps=1 if length <= 16 else 4, **LAUNCH,
    )


@triton.jit
def _ordered(x):
    """Unsigned integers in the order of the floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _draw(
    logits_ptr, bias_ptr, step_ptr, uniform_ptr, code_ptr, log_prob_ptr, frames, temperature, top_p,
    V: tl.constexpr, BV: tl.constexpr, BOOK: tl.constexpr, BOOKS: tl.constexpr, FREE: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, GREEDY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, v = tl.program_id(0), tl.arange(0, BV)
    _await(EARLY)
    step = tl.load(step_ptr + row)
    x = tl.load(logits_ptr + row * V + v, mask=v < V, other=-float("inf"))
    if BOOK == 0:
        x += tl.load(bias_ptr + tl.where(step < FREE, 0, V) + v, mask=v < V, other=0.0)
    x = x / temperature
    top = tl.max(x)
    key = _ordered(x)
    weight = tl.exp(x - top)
    everything = tl.sum(weight)
    if TOP_K > 0:  # the largest key that TOP_K ids reach, bit by bit
        lowest = tl.zeros((1,), tl.uint32)
        for bit in range(32):
            higher = lowest | (tl.full((1,), 1, tl.uint32) << (31 - bit))
            lowest = tl.where(tl.sum((key >= higher).to(tl.int32)) >= TOP_K, higher, lowest)
        weight = tl.where(key >= lowest, weight, 0.0)
    if TOP_P:  # the largest key up to which the mass may go
        limit, below = (1 - top_p) * tl.sum(weight), tl.zeros((1,), tl.uint32)
        for bit in range(32):
            higher = below | (tl.full((1,), 1, tl.uint32) << (31 - bit))
            below = tl.where(tl.sum(tl.where(key <= higher, weight, 0.0)) <= limit, higher, below)
        weight = tl.where((key > below) | (x == top), weight, 0.0)
    if GREEDY:
        code = tl.min(tl.where(x == top, v, BV))
    else:
        passed = tl.cumsum(weight)
        uniform = tl.load(uniform_ptr + (row * frames + step) * BOOKS + BOOK)
        possible = weight > 0
        code = tl.min(tl.where(possible & (passed > uniform * tl.max(passed)), v, BV))
        code = tl.minimum(code, tl.max(tl.where(possible, v, 0)))
    tl.store(code_ptr + row * BOOKS + BOOK, code.to(tl.int64))
    if BOOK == 0:
        chosen = tl.sum(tl.where(v == code, x, 0.0))
        tl.store(log_prob_ptr + row, chosen - top - tl.log(everything))


def draw(
    logits: Tensor, bias: Tensor, step: Tensor, uniform: Tensor, codes: Tensor, log_probs: Tensor, book: int,
    temperature: float, top_k: int, top_p: float, free: int,
) -> None:
    """Draws a code of one book for every row, as `sampling.draw` does, into `codes` (B, books).

    `logits` (B, V) float32; `uniform` (B, F, books), read at the row's `step` (B,). Of book 0, `bias` (2, V) is added,
    its first row before step `free`, and `log_probs` (B,) are those of the whole softmax.
    """
    rows, size = logits.shape
    _draw[(rows,)](
        logits, bias, step, uniform, codes, log_probs, uniform.shape[1], temperature or 1.0, top_p, V=size,
        BV=triton.next_power_of_2(size), BOOK=book, BOOKS=codes.shape[1], FREE=free, TOP_K=top_k if top_k < size else 0,
        TOP_P=top_p < 1, GREEDY=temperature == 0, EARLY=EARLY, num_warps=8, **LAUNCH,
    )
