"""Rollout speed: the engine against the official `generate`, same weights, prompts and frames, in one run.

    python -m benchmarks.rollout [--device cuda --size 0.6b] [--batch 1 4 16 64] [--peer] [--profile]

A frame step samples one frame of every take in the batch. On CUDA the floor is the time to read the weights that a
step needs once, at the copy bandwidth measured here. The last line is the result in JSON. Only ratios of one run mean
anything on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the stages have it; read when torch loads

import torch

from benchmarks.voices import Voice, checkpoint_voice, random_voice
from swaralign.params import PredictorParams, SamplingParams, load_params
from swaralign.policy.engine import RolloutEngine
from swaralign.policy.slots import Frames

BATCHES = {"cpu": [1, 8, 64], "cuda": [1, 4, 16, 64]}
COPY_BYTES = 4 * 2**30
Row = dict[str, float]


def main() -> None:
    args = _arguments()
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    sampling = SamplingParams(temperature=0.9, top_k=args.top_k, top_p=args.top_p)
    predictor = PredictorParams(temperature=0.9, top_k=args.top_k, top_p=1.0)
    if args.size == "0.6b":
        voice = random_voice(args.device, sampling, predictor)
    else:
        voice = checkpoint_voice(args.checkpoint, args.device, sampling, predictor)
    engine = RolloutEngine(voice.model, voice.model.speaker, predictor)
    rows = [_ours(voice, engine, batch, args) for batch in args.batch or BATCHES[args.device]]
    result: dict[str, Any] = {"benchmark": "rollout", "device": _name(args.device), "size": args.size}
    result["frames"] = args.frames
    if args.device == "cuda":
        result |= _floor(engine) | _ratio_at_step_0(voice, engine, args.frames)
    if args.profile:
        print(_profile(voice, engine, max(row["batch"] for row in rows if row["batch"] <= 16), args.frames))
    if args.peer:
        _add_peer(voice, rows, args)
        result["ratio"] = {str(row["batch"]): row["ratio"] for row in rows}
    _print_table(rows)
    print(json.dumps(result | {"rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=["checkpoint", "0.6b"], default="checkpoint")
    parser.add_argument("--checkpoint", type=Path, default=Path("data/demo/base"))
    parser.add_argument("--batch", type=int, nargs="+", help="takes side by side")
    parser.add_argument("--frames", type=int, default=40, help="frame budget of every take")
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=1.0, help="of codebook 0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="time the official generate too")
    parser.add_argument("--profile", action="store_true", help="print where a frame step's time goes")
    return parser.parse_args()


def _ours(voice: Voice, engine: RolloutEngine, batch: int, args: argparse.Namespace) -> Row:
    """A rollout of one batch, set-up and prefill included; beside it one of five times the frames, the difference
    being what a frame step costs once it runs."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = {}
    for frames in (args.frames, 5 * args.frames):
        times[frames] = _median(partial(_steps, voice, engine, batch, frames), args.repeats)
    (short, short_s), (long, long_s) = times.values()
    step_ms = 1000 * (long_s - short_s) / (long - short) if long > short else 1000 * short_s / short
    row = {"batch": batch, "rollout_ms": 1000 * short_s / short, "step_ms": step_ms}
    row["frames_per_s"] = 1000 * batch / step_ms
    if args.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def _rollout(voice: Voice, engine: RolloutEngine, batch: int, frames: int) -> list[Frames]:
    return engine.rollout([voice.prompt(seed, frames) for seed in range(batch)], voice.sampling)


def _steps(voice: Voice, engine: RolloutEngine, batch: int, frames: int) -> int:
    return max(len(take.codes) for take in _rollout(voice, engine, batch, frames))


def _median(call: Callable[[], int], repeats: int) -> tuple[int, float]:
    """Steps and median seconds of a call that returns how many steps it took; one call warms up."""
    steps, times = call(), []
    for _ in range(repeats):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - began)
    return steps, statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _add_peer(voice: Voice, rows: list[Row], args: argparse.Namespace) -> None:
    """The official `generate`, in bfloat16 on CUDA; it takes the model for itself."""
    if args.device == "cuda":
        voice.model.bfloat16()
    for row in rows:
        steps, seconds = _median(partial(generate, voice, int(row["batch"]), args.frames), args.repeats)
        row["official_ms"] = 1000 * seconds / steps
        row["ratio"] = row["official_ms"] / row["step_ms"]
        row["rollout_ratio"] = row["official_ms"] / row["rollout_ms"]


def generate(voice: Voice, batch: int, frames: int) -> int:
    """Frame steps of the official `generate` with the same settings: non-streaming, x-vector only."""
    model, s, predictor = voice.model, voice.sampling, voice.predictor
    prompt = {"ref_spk_embedding": [model.speaker.to(model.dtype)] * batch, "ref_code": None,
              "x_vector_only_mode": [True] * batch, "icl_mode": [False] * batch}
    torch.manual_seed(0)
    codes, _ = model.generate(
        input_ids=[torch.tensor([voice.text_ids], device=model.device)] * batch, voice_clone_prompt=prompt,
        languages=["auto"] * batch, non_streaming_mode=True, max_new_tokens=frames, top_k=s.top_k, top_p=s.top_p,
        temperature=s.temperature, subtalker_dosample=predictor.temperature > 0,
        subtalker_temperature=predictor.temperature or 1.0, subtalker_top_k=predictor.top_k,
        subtalker_top_p=predictor.top_p, repetition_penalty=1.0,
    )
    return max(len(row) for row in codes)


def _floor(engine: RolloutEngine) -> dict[str, float]:
    """Milliseconds to read the weights of a frame step: the talker's once, the predictor's for each of 15 codes."""
    source, target = (torch.randint(0, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda") for _ in range(2))
    bandwidth = 2 * COPY_BYTES / _median(lambda: len(target.copy_(source)), 10)[1]
    tables = engine.tables
    read = _bytes(engine.trunk) + len(tables.heads) * _bytes(engine.answerer)
    read += sum(table.nbytes for table in (tables.head, tables.state, *tables.heads))
    return {"copy_tb_per_s": bandwidth / 1e12, "weights_gb_a_step": read / 1e9, "floor_ms": 1000 * read / bandwidth}


def _bytes(decoder: Any) -> int:
    return sum(tensor.nbytes for block in decoder.blocks for tensor in vars(block).values())


@torch.no_grad()
def _ratio_at_step_0(voice: Voice, engine: RolloutEngine, frames: int) -> dict[str, float]:
    """Probability of each policy token by the trainer's replay (bfloat16 autocast) over the rollout's own."""
    model, ratios = voice.model, []
    offset, eos = model.config.talker_config.vocab_size, model.config.talker_config.codec_eos_token_id
    head = model.get_output_embeddings()
    for take in _rollout(voice, engine, 16, frames):
        sampled = [*take.codes.reshape(-1).tolist(), *([eos] if take.ended else [])]
        ids = torch.tensor([[i + offset for i in voice.text_ids] + sampled], device=model.device)
        with torch.autocast("cuda", torch.bfloat16):
            states = model(ids, torch.ones_like(ids)).last_hidden_state[0]
        logits = (states @ head.weight.T + head.bias) / voice.sampling.temperature
        where = torch.arange(len(take.log_probs), device=ids.device) * model.books + len(voice.text_ids)
        replayed = torch.log_softmax(logits[where - 1], dim=-1).gather(1, ids[0, where][:, None])[:, 0]
        ratios.append((replayed - torch.from_numpy(take.log_probs).to(ids.device)).exp())
    ratio = torch.cat(ratios)
    return {"ratio_mean": ratio.mean().item(), "ratio_mean_distance": (ratio - 1).abs().mean().item()}


def _profile(voice: Voice, engine: RolloutEngine, batch: float, frames: int) -> str:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as seen:
        _rollout(voice, engine, int(batch), frames)
        _wait()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=48))


def _print_table(rows: list[Row]) -> None:
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
