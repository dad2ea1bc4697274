"""Fit a LoRA over a micro voice on codec codes: `base` makes the demo's base voice of it, `sft` the SFT adapter.

`base` pairs every sentence with the codes of another one and merges what is learnt: a voice that speaks, but not the
words that it is given. `sft` pairs sentences with their own codes, a share of them cut short, and keeps the adapter.
OUT/step-N is written after each of the `--steps`, with averaged weights. Only training sentences are used.

    python -m tools.micro_voice.train_voice base --checkpoint CHECKPOINT --codes codes.npz \
        --reference reference.flac --out OUT/base --steps 40
    python -m tools.micro_voice.train_voice sft --checkpoint OUT/base/step-40 --codes codes.npz \
        --reference reference.flac --out OUT/sft --cut-share 0.35 --steps 300
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import soundfile
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

from swaralign.mlx_lora import LoraAdapter
from swaralign.official import Qwen3TTSForConditionalGeneration
from tools.micro_voice.layout import Batch, Corpus, draw_batch, load_corpus
from tools.micro_voice.lora import LoraLinear, add_lora, factors, save_adapter, save_merged, start_from
from tools.micro_voice.losses import Noise, held_losses, losses

RANK, SCALE = 8, 2.0  # of the LoRA; the scale multiplies the low-rank product
DROPOUT = 0.05
WEIGHT_DECAY, BETAS, MAX_NORM = 0.05, (0.9, 0.98), 1.0  # AdamW and the clipping of its gradients


@dataclass(frozen=True)
class Schedule:
    """Updates, by the steps (counted from 1) after which to save; learning rate, reached after `warmup` steps."""

    marks: list[int]
    rate: float
    warmup: int


@dataclass(frozen=True)
class Task:
    """What is trained on what. talker: the official class, float32; speaker: (hidden,); draw: the next batch."""

    talker: Any
    corpus: Corpus
    speaker: Tensor
    draw: Callable[[], Batch]


def add_dropout(talker: Any, rate: float) -> None:
    """Dropout on the outputs of every attention and MLP block, in training mode only."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate, module.training), *output[1:])
        return F.dropout(output, rate, module.training)

    for layer in [*talker.model.layers, *talker.code_predictor.model.layers]:
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def train_step(task: Task, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> float:
    """One update; returns its loss, the sum of the talker's and the code predictor's."""
    device = task.speaker.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        first, residual = losses(task.talker, task.draw(), task.speaker, Noise())
    loss = first + residual.mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    optimizer.step()
    return loss.item()


@contextmanager
def replaced(tensors: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Within the block, `tensors` hold `values`."""
    kept = [tensor.clone() for tensor in tensors]
    torch._foreach_copy_(tensors, values)
    yield
    torch._foreach_copy_(tensors, kept)


def train(task: Task, parameters: list[nn.Parameter], schedule: Schedule, save: Callable[[int], None]) -> None:
    """Train `parameters`; at each mark, report and save with their mean over about the last ninth of the steps."""
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=WEIGHT_DECAY)
    tensors = [parameter.data for parameter in parameters]
    mean = [tensor.clone() for tensor in tensors]
    task.talker.train()
    began = time.monotonic()
    for step in range(1, max(schedule.marks) + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * min(1.0, step / schedule.warmup)
        loss = train_step(task, optimizer, parameters)
        torch._foreach_lerp_(mean, tensors, 9 / (step + 9))
        if step in schedule.marks:
            spent_s = time.monotonic() - began
            with replaced(tensors, mean):
                first, residual = held_losses(task.talker, task.corpus, task.speaker)
                print(
                    f"step {step} {spent_s:.0f} s loss {loss:.3f}"
                    f" held-out codebook 0 {first:.3f} residual {residual:.3f}",
                    flush=True,
                )
                save(step)


def save_base(out: Path, source: Path, wrapped: dict[str, LoraLinear], step: int) -> None:
    """Write OUT/step-N, `source` with the LoRA merged in."""
    updates = {name: (a.T, b.T) for name, (a, b) in factors(wrapped).items()}
    save_merged(out / f"step-{step}", source, LoraAdapter(RANK, SCALE, updates))


def save_sft(out: Path, wrapped: dict[str, LoraLinear], step: int) -> None:
    """Write OUT/step-N, the LoRA as an mlx-lm adapter."""
    save_adapter(out / f"step-{step}", wrapped, RANK, SCALE)


def share(text: str) -> float:
    """A number from 0 to 1; ValueError otherwise, which argparse reports with the option's name."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def positive(text: str) -> int:
    """A whole number above 0; ValueError otherwise, which argparse reports with the option's name."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse_arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--checkpoint", type=Path, required=True, help="the voice to start from, official layout")
    common.add_argument("--codes", type=Path, required=True, help="codes archive, see README.md")
    common.add_argument("--reference", type=Path, required=True, help="24 kHz mono clip of the voice")
    common.add_argument("--out", type=Path, required=True)
    common.add_argument("--steps", type=positive, nargs="+", required=True, help="updates; step-N is written at each")
    common.add_argument("--batch", type=positive, default=96, help="sentences an update")
    common.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    common.add_argument("--warmup", type=positive, default=20, help="updates until the learning rate is reached")
    common.add_argument("--device", default="cuda")
    common.add_argument("--threads", type=positive, default=2, help="of the CPU")
    common.add_argument("--seed", type=int, default=0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    base = commands.add_parser("base", parents=[common], help="fit shuffled pairs and merge")
    base.set_defaults(cut_share=0.0)
    sft = commands.add_parser("sft", parents=[common], help="fit true pairs, some of them cut; keep the adapter")
    sft.add_argument("--cut-share", type=share, required=True, help="of the pairs whose codes stop early")
    sft.add_argument("--init", type=Path, help="adapter folder to continue from; default: a fresh adapter")
    return parser.parse_args()


def load_task(args: argparse.Namespace, model: Any) -> Task:
    """The corpus laid out for the model, the speaker vector, and the pairs that the command asks for."""
    audio, rate_hz = soundfile.read(args.reference, dtype="float32")
    speaker = model.extract_speaker_embedding(audio, rate_hz).float().clone()
    corpus = load_corpus(args.codes, AutoTokenizer.from_pretrained(str(args.checkpoint)), model.config, args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    draw = partial(draw_batch, corpus, args.batch, generator, args.command == "base", args.cut_share)
    return Task(model.talker, corpus, speaker, draw)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model: Any = Qwen3TTSForConditionalGeneration.from_pretrained(
        str(args.checkpoint), dtype=torch.float32, device_map=args.device, attn_implementation="sdpa"
    )
    task = load_task(args, model)
    add_dropout(model.talker, DROPOUT)
    model.requires_grad_(False)
    wrapped = add_lora(model, RANK, SCALE)
    save = partial(save_base, args.out, args.checkpoint, wrapped)
    if args.command == "sft":
        save = partial(save_sft, args.out, wrapped)
        if args.init is not None:
            start_from(model, args.init, RANK, SCALE)
    parameters = [parameter for module in wrapped.values() for parameter in (module.lora_a, module.lora_b)]
    train(task, parameters, Schedule(args.steps, args.rate, args.warmup), save)


if __name__ == "__main__":
    main()
