"""The loops of a frame on a CPU, compiled by Numba once and kept beside this file.

What is kept is found again by this file alone, so that nothing of another file may be compiled in.
Between two sums of a small model a framework costs more than the sums. A slot's sums run in one order, whatever stands
beside it: its numbers are the same to the bit in any company.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

Array = np.ndarray
QUAD, DEPTH = 4, 8  # rows, and inputs of each, that a matrix product takes at a time
LINE = 16  # float32 numbers in a line of the processor's cache
# Sums of one row may be reordered, so that they run in vector registers; infinities keep their meaning.
compiled = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")
in_order = njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")


_LOG2_E = np.float32(1.44269504)
_LN_2 = (np.float32(0.693359375), np.float32(-2.12194440e-4))  # their sum is the logarithm of 2
_EXP = tuple(np.float32(c) for c in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
))


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Asks for the line that holds element `index` of a contiguous array (n,); never waits, never fails."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(memory, [arguments[1]]), byte)
        read, second_level, data = (ir.Constant(number, value) for value in (0, 2, 1))
        builder.call(function, [place, read, second_level, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch)


class Stack(NamedTuple):
    """A decoder's weights, stacked over layers, its cache (L, B, KV, length, d) and rotary tables (length, d / 2)."""

    qkv: Array
    qk_norm: Array
    output: Array
    gate_up: Array
    down: Array
    keys: Array
    values: Array
    cos: Array
    sin: Array
    floor: float
    head_floor: float


class Net(NamedTuple):
    """`slots.Tables` as arrays, and the frames before which no take may end."""

    head: Array
    bias: Array
    state: Array
    state_bias: Array
    first_input: Array
    inputs: Array
    heads: Array
    first_embedding: Array
    embeddings: Array
    pad: Array
    eos: int
    min_frames: int


class Rows(NamedTuple):
    """`slots.Slots` as arrays, the cache apart."""

    x: Array
    position: Array
    step: Array
    budget: Array
    alive: Array
    ended: Array
    uniform: Array
    codes: Array
    log_probs: Array


class Sampler(NamedTuple):
    temperature: float
    top_k: int
    top_p: float


@compiled
def frames(
    live: Array, speaking: int, trunk: Stack, answerer: Stack, net: Net, rows: Rows, policy: Sampler, answer: Sampler
) -> None:
    """Frames of the live slots, one after another, until fewer slots speak than `speaking`, other threads' counted."""
    # Other threads write these flags meanwhile. They only fall, so a late look costs a frame that is needed anyway.
    while rows.alive.sum() == speaking:
        _frame(live, trunk, answerer, net, rows, policy, answer)


@compiled
def _frame(live: Array, trunk: Stack, answerer: Stack, net: Net, rows: Rows, policy: Sampler, answer: Sampler) -> None:
    """Chooses codebook 0 of the live slots, has it answered, and steps the talker where a take goes on."""
    hidden = _unit(rows.x[live], trunk.floor)
    spoken = _choose(live, hidden, net, rows, policy)
    if spoken.any():
        _answer(live[spoken], hidden[spoken], answerer, net, rows, answer)
    going = live[rows.alive[live]]
    x = np.empty((len(going), rows.x.shape[1]), np.float32)
    for i, slot in enumerate(going):
        codes = rows.codes[slot, rows.step[slot] - 1]
        x[i] = net.pad + net.first_embedding[codes[0]]
        for book in range(1, len(codes)):
            x[i] += net.embeddings[book - 1, codes[book]]
    x = _step(trunk, going, rows.position[going], x)
    for i, slot in enumerate(going):
        rows.x[slot] = x[i]
        rows.position[slot] += 1


@compiled
def _choose(live: Array, hidden: Array, net: Net, rows: Rows, sampler: Sampler) -> Array:
    """Draws codebook 0 or the end of speech of each slot; which of them speak."""
    logits = _times(hidden, net.head)
    spoken = np.ones(len(live), np.bool_)
    for i, slot in enumerate(live):
        step = rows.step[slot]
        scaled = (logits[i] + net.bias[1 if step >= net.min_frames else 0]) / np.float32(sampler.temperature)
        code = _draw(scaled, rows.uniform[slot, step, 0], sampler)
        top = scaled.max()
        rows.log_probs[slot, step] = scaled[code] - top - np.log(np.exp(scaled - top).sum())
        rows.codes[slot, step, 0] = code
        if code == net.eos:
            spoken[i], rows.alive[slot], rows.ended[slot] = False, False, True
    return spoken


@compiled
def _answer(slots: Array, hidden: Array, stack: Stack, net: Net, rows: Rows, sampler: Sampler) -> None:
    """Draws the residual codes of a frame and counts it; `hidden` (n, D) are the states that chose codebook 0."""
    count, books = len(slots), rows.codes.shape[2]
    opening = np.empty((2 * count, net.state.shape[1]), np.float32)
    opening[:count] = _times(hidden, net.state) + net.state_bias
    for i, slot in enumerate(slots):
        opening[count + i] = net.first_input[rows.codes[slot, rows.step[slot], 0]]
    x = _step(stack, np.concatenate((slots, slots)), np.repeat(np.arange(2), count), opening)[count:].copy()
    for book in range(1, books):
        logits = _times(_unit(x, stack.floor), net.heads[book - 1])
        for i, slot in enumerate(slots):
            scaled = logits[i] if sampler.temperature == 0 else logits[i] / np.float32(sampler.temperature)
            code = _draw(scaled, rows.uniform[slot, rows.step[slot], book], sampler)
            rows.codes[slot, rows.step[slot], book] = code
            if book < books - 1:
                x[i] = net.inputs[book - 1, code]
        if book < books - 1:
            x = _step(stack, slots, np.full(count, book + 1), x)
    for slot in slots:
        rows.step[slot] += 1
        rows.alive[slot] = rows.step[slot] < rows.budget[slot]


@compiled
def _draw(scaled: Array, uniform: float, sampler: Sampler) -> int:
    """A draw from logits (V,) that are scaled by the temperature, as `sampling.draw` makes it."""
    if sampler.temperature == 0:
        return int(scaled.argmax())
    lowest, top = -np.inf, scaled.max()
    if 0 < sampler.top_k < len(scaled) or sampler.top_p < 1:
        lowest = _lowest(np.sort(scaled), sampler.top_k, sampler.top_p)
    weights = np.where(scaled >= lowest, np.exp(scaled - top), np.float32(0))
    threshold, passed, last = uniform * weights.astype(np.float64).sum(), 0.0, 0
    for code, weight in enumerate(weights):
        passed += weight
        if weight > 0:
            last = code
            if passed > threshold:
                break
    return last


@compiled
def _lowest(ascending: Array, top_k: int, top_p: float) -> float:
    """The smallest scaled logit that top-k, then top-p, leave in."""
    kept = ascending[-top_k:] if 0 < top_k < len(ascending) else ascending
    weights = np.exp(kept - kept[-1]).astype(np.float64)
    limit, passed = (1 - top_p) * weights.sum(), 0.0
    for value, weight in zip(kept, weights):  # noqa: B905 - Numba knows no strict
        passed += weight
        if passed > limit:
            return value
    return kept[-1]


@compiled
def _step(stack: Stack, slots: Array, at: Array, x: Array) -> Array:
    """Appends a token (n, D) to each slot at its position: the residual stream (n, D) after the last layer.

    A slot may stand twice, its earlier token first.
    """
    for layer in range(len(stack.qkv)):
        mixed = _attend(stack, layer, slots, at, _times(_unit(x, stack.floor), stack.qkv[layer]))
        x = x + _times(mixed, stack.output[layer])
        gate_up = _times(_unit(x, stack.floor), stack.gate_up[layer])
        half = gate_up.shape[1] // 2
        gated = np.empty((len(x), half), np.float32)
        for i in range(len(x)):
            _gate(gate_up[i, :half], gate_up[i, half:], gated[i])
        x = x + _times(gated, stack.down[layer])
    return x


@in_order
def _gate(gate: Array, up: Array, out: Array) -> None:
    """SiLU of `gate` (n,) times `up`. The exponential is Cephes' `expf`, as one that runs in vector registers."""
    power = np.empty(len(gate), np.int32)
    for j in range(len(gate)):
        x = min(max(-gate[j], np.float32(-87)), np.float32(87))
        whole = np.floor(x * _LOG2_E + np.float32(0.5))
        rest = x - whole * _LN_2[0] - whole * _LN_2[1]
        series = _EXP[0]
        for term in _EXP[1:]:
            series = series * rest + term
        out[j] = series * rest * rest + rest + np.float32(1)
        power[j] = (np.int32(whole) + 127) << 23
    scale = power.view(np.float32)
    for j in range(len(gate)):
        out[j] = gate[j] * up[j] / (np.float32(1) + out[j] * scale[j])


@compiled
def _times(x: Array, w: Array) -> Array:
    """`x` (n, K) times `w` (K, N), K a multiple of 8: by blocks, so that `w` is read in order and few times."""
    rows = QUAD * -(-len(x) // QUAD)
    padded, out = np.zeros((rows, x.shape[1]), np.float32), np.zeros((rows, w.shape[1]), np.float32)
    padded[: len(x)] = x
    for k in range(0, len(w), DEPTH):
        _fetch(w[k + DEPTH : k + 2 * DEPTH])
        for i in range(0, rows, QUAD):
            _add_outer(padded[i : i + QUAD, k : k + DEPTH], w[k : k + DEPTH], out[i : i + QUAD])
    return out[: len(x)]


@compiled
def _fetch(block: Array) -> None:
    """Asks for the memory of a block (n, N): a talker's weights fit no core's cache, and no core foresees the rows."""
    flat = block.reshape(-1)
    for j in range(0, len(flat), LINE):
        prefetch(flat, j)


@in_order
def _add_outer(x: Array, w: Array, out: Array) -> None:
    """Adds `x` (4, 8) times `w` (8, N) to `out` (4, N)."""
    a0, a1, a2, a3, a4, a5, a6, a7 = x[0, 0], x[0, 1], x[0, 2], x[0, 3], x[0, 4], x[0, 5], x[0, 6], x[0, 7]
    b0, b1, b2, b3, b4, b5, b6, b7 = x[1, 0], x[1, 1], x[1, 2], x[1, 3], x[1, 4], x[1, 5], x[1, 6], x[1, 7]
    c0, c1, c2, c3, c4, c5, c6, c7 = x[2, 0], x[2, 1], x[2, 2], x[2, 3], x[2, 4], x[2, 5], x[2, 6], x[2, 7]
    d0, d1, d2, d3, d4, d5, d6, d7 = x[3, 0], x[3, 1], x[3, 2], x[3, 3], x[3, 4], x[3, 5], x[3, 6], x[3, 7]
    w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    a, b, c, d = out[0], out[1], out[2], out[3]
    for j in range(w.shape[1]):
        u0, u1, u2, u3, u4, u5, u6, u7 = w0[j], w1[j], w2[j], w3[j], w4[j], w5[j], w6[j], w7[j]
        a[j] += a0 * u0 + a1 * u1 + a2 * u2 + a3 * u3 + a4 * u4 + a5 * u5 + a6 * u6 + a7 * u7
        b[j] += b0 * u0 + b1 * u1 + b2 * u2 + b3 * u3 + b4 * u4 + b5 * u5 + b6 * u6 + b7 * u7
        c[j] += c0 * u0 + c1 * u1 + c2 * u2 + c3 * u3 + c4 * u4 + c5 * u5 + c6 * u6 + c7 * u7
        d[j] += d0 * u0 + d1 * u1 + d2 * u2 + d3 * u3 + d4 * u4 + d5 * u5 + d6 * u6 + d7 * u7


@compiled
def _unit(x: Array, floor: float) -> Array:
    """Each row of `x` (n, D) over its length; see `decoder.unit`."""
    out = np.empty_like(x)
    for i in range(len(x)):
        total = np.float32(floor * floor)
        for j in range(x.shape[1]):
            total += x[i, j] * x[i, j]
        out[i] = x[i] * (np.float32(1) / np.sqrt(total))
    return out


@compiled
def _attend(stack: Stack, layer: int, slots: Array, at: Array, qkv: Array) -> Array:
    """Writes keys and values of `qkv` into the cache; what the queries see, (n, heads d)."""
    norms, keys, values = stack.qk_norm[layer], stack.keys[layer], stack.values[layer]
    groups, size = len(norms) - 1, norms.shape[1]
    query, scores = np.empty(size, np.float32), np.empty(keys.shape[2], np.float32)
    mixed = np.empty((len(slots), keys.shape[1] * groups * size), np.float32)
    for i, slot in enumerate(slots):
        end = at[i] + 1
        cos, sin = stack.cos[at[i]], stack.sin[at[i]]
        for head in range(keys.shape[1]):
            parts = qkv[i, head * (groups + 2) * size : (head + 1) * (groups + 2) * size].reshape(-1, size)
            _turn(parts[groups], norms[groups], cos, sin, stack.head_floor, keys[slot, head, at[i]])
            values[slot, head, at[i]] = parts[groups + 1]
            for group in range(groups):
                _turn(parts[group], norms[group], cos, sin, stack.head_floor, query)
                place = (head * groups + group) * size
                _mix(query, keys[slot, head, :end], values[slot, head, :end], scores, mixed[i, place : place + size])
    return mixed


@compiled
def _turn(part: Array, norm: Array, cos: Array, sin: Array, floor: float, out: Array) -> None:
    """A head's query or key, normed and rotated."""
    total, half = np.float32(floor * floor), len(cos)
    for j in range(len(part)):
        total += part[j] * part[j]
    scale = np.float32(1) / np.sqrt(total)
    for j in range(half):
        low, high = part[j] * scale * norm[j], part[half + j] * scale * norm[half + j]
        out[j] = low * cos[j] - high * sin[j]
        out[half + j] = high * cos[j] + low * sin[j]


@compiled
def _mix(query: Array, keys: Array, values: Array, scores: Array, out: Array) -> None:
    """The values (T, d) of the keys (T, d), each by its share of the attention."""
    top = np.float32(-np.inf)
    for t in range(len(keys)):
        score = np.float32(0)
        for j in range(len(query)):
            score += query[j] * keys[t, j]
        scores[t] = score
        top = max(top, score)
    total = np.float32(0)
    out[:] = 0
    for t in range(len(keys)):
        share = np.exp(scores[t] - top)
        total += share
        for j in range(len(query)):
            out[j] += share * values[t, j]
    out /= total
