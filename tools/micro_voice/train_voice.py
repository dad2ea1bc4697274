"""Train a micro base voice from scratch on codec codes, then fit a LoRA over it: the demo's base and SFT adapter.

Three phases per base snapshot: talker and code predictor together; the code predictor alone, the talker frozen;
a rank-8 LoRA over the result as rounded to bfloat16. Only training sentences are used.

    python -m tools.micro_voice.train_voice --checkpoint CHECKPOINT --codes codes.npz \
        --reference reference.flac --out OUT
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import soundfile
import torch
import torch.nn.functional as F
from qwen_tts import Qwen3TTSModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tools.micro_voice.layout import Corpus, draw_batch, load_corpus
from tools.micro_voice.lora import add_lora, remove_lora, save_adapter
from tools.micro_voice.losses import Noise, held_losses, losses

Marks = dict[int, Callable[[], None]]  # what to do after which step, counted from 1


@dataclass(frozen=True)
class Phase:
    """One stretch of training: its steps, learning rate (reached after `warmup` steps) and loss weights."""

    name: str
    steps: int
    rate: float
    warmup: int
    first_weight: float = 1.0
    residual_weight: float = 1.0
    decay: bool = False  # cosine to a twentieth by the last step


@dataclass
class Run:
    """What every phase shares. talker: the official class, float32; speaker: (hidden,)."""

    talker: Any
    corpus: Corpus
    speaker: Tensor
    batch: int
    noise: Noise
    generator: torch.Generator


def reinitialise(module: nn.Module, std: float) -> None:
    """Fresh weights: matrices normal with `std`, biases zero, norms one."""
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=std)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def add_dropout(talker: Any, rate: float) -> None:
    """Dropout on the outputs of every attention and MLP block, in training mode only."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate, module.training), *output[1:])
        return F.dropout(output, rate, module.training)

    for layer in [*talker.model.layers, *talker.code_predictor.model.layers]:
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def average(mean: list[Tensor], current: list[Tensor], step: int) -> None:
    """Running mean of the weights over about the last ninth of the steps."""
    torch._foreach_lerp_(mean, current, 9 / (step + 10))


def rate_at(phase: Phase, step: int) -> float:
    """Learning rate of a step counted from 0."""
    rate = phase.rate * min(1.0, (step + 1) / phase.warmup)
    if phase.decay:
        rate *= 0.525 + 0.475 * math.cos(math.pi * step / phase.steps)
    return rate


def optimiser(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, weight decay on matrices only."""
    chosen = list(parameters)
    groups = [
        {"params": [p for p in chosen if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in chosen if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.98), fused=chosen[0].is_cuda)


def train_step(run: Run, phase: Phase, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> Tensor:
    """One update; returns its loss."""
    batch = draw_batch(run.corpus, run.batch, run.generator)
    device = run.speaker.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        first, residual = losses(run.talker, batch, run.speaker, run.noise)
    loss = phase.first_weight * first + phase.residual_weight * residual.mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return loss.detach()


def train(run: Run, phase: Phase, parameters: list[nn.Parameter], marks: Marks) -> None:
    """Train `parameters`; after the step numbers in `marks`, call the mark with the averaged weights in place."""
    optimizer = optimiser(parameters)
    tensors = [p.data for p in parameters]
    mean = [t.clone() for t in tensors]
    run.talker.train()
    began = time.monotonic()
    for step in range(phase.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(phase, step)
        loss = train_step(run, phase, optimizer, list(parameters))
        average(mean, tensors, step)
        if step + 1 in marks:
            spent = time.monotonic() - began
            kept = [t.clone() for t in tensors]
            torch._foreach_copy_(tensors, mean)
            first, residual = held_losses(run.talker, run.corpus, run.speaker)
            print(
                f"{phase.name} step {step + 1} {spent:.0f} s loss {loss.item():.3f}"
                f" held-out codebook 0 {first:.3f} residual {residual:.3f}",
                flush=True,
            )
            marks[step + 1]()
            torch._foreach_copy_(tensors, kept)
    torch._foreach_copy_(tensors, mean)


def only(module: nn.Module, wanted: Callable[[str], bool]) -> list[nn.Parameter]:
    """Freeze all parameters but those whose name is wanted, and return these."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted(name))
    return [p for p in module.parameters() if p.requires_grad]


def in_predictor(name: str) -> bool:
    """The code predictor's own weights; its code embeddings are also the talker's inputs and stay as they are."""
    return name.startswith("code_predictor.") and "codec_embedding" not in name


def save_base(folder: Path, source: Path, talker: nn.Module) -> None:
    """Write a checkpoint: `source` with its talker replaced, in bfloat16; the talker in memory is rounded too."""
    for path in filter(Path.is_file, source.rglob("*")):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in talker.state_dict().items():
        tensor.copy_(tensor.bfloat16())
        tensors[f"talker.{name}"] = tensor.bfloat16().cpu().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fit_lora(run: Run, model: nn.Module, args: argparse.Namespace, out: Path) -> None:
    """Fit an adapter over the model as it stands, saving it at each of its marks, then take it off again."""
    only(run.talker, lambda name: False)
    wrapped = add_lora(model, args.rank, args.scale)
    parameters = [p for module in wrapped.values() for p in (module.lora_a, module.lora_b)]
    phase = Phase("lora", max(args.lora_steps), args.lora_rate, 20, decay=args.lora_decay)
    marks: Marks = {step: partial(save_adapter, out / f"lora-{step}", wrapped) for step in args.lora_steps}
    train(run, phase, parameters, marks)
    remove_lora(model, wrapped)


def finish_base(run: Run, model: nn.Module, args: argparse.Namespace, step: int) -> None:
    """The two later phases over the talker as it stands; its weights are put back afterwards."""
    kept = {name: tensor.clone() for name, tensor in run.talker.state_dict().items()}
    out = args.out / f"base-{step}"
    alone = Phase("predictor", args.predictor_steps, 6e-4, 50, first_weight=0.0, decay=True)
    train(run, alone, only(run.talker, in_predictor), {})
    save_base(out, args.checkpoint, run.talker)
    fit_lora(run, model, args, out)
    run.talker.load_state_dict(kept)
    only(run.talker, lambda name: True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="gives all but the talker, see README.md")
    parser.add_argument("--codes", type=Path, required=True, help="codes archive, see README.md")
    parser.add_argument("--reference", type=Path, required=True, help="24 kHz mono clip of the voice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=96, help="sentences an update")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="learning rate of the first phase")
    parser.add_argument(
        "--base-steps", type=int, nargs="*", default=[1000], help="a base is finished at each; none: adapt CHECKPOINT"
    )
    parser.add_argument("--predictor-steps", type=int, default=300)
    parser.add_argument("--lora-steps", type=int, nargs="+", default=[100, 200, 400, 800], help="saved at each")
    parser.add_argument("--lora-rate", type=float, default=2e-3)
    parser.add_argument("--lora-decay", action="store_true", help="let the adapter's rate fall on a cosine")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--scale", type=float, default=2.0, help="multiplier of the low-rank update")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_base(run: Run, model: nn.Module, args: argparse.Namespace) -> None:
    """Train from fresh weights; at each of the base steps, finish a base and its adapters aside."""
    reinitialise(run.talker, run.talker.config.initializer_range)
    phase = Phase("base", max(args.base_steps), args.rate, min(150, max(args.base_steps)))
    marks: Marks = {step: partial(finish_base, run, model, args, step) for step in args.base_steps}
    train(run, phase, only(run.talker, lambda name: True), marks)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    wrapper = Qwen3TTSModel.from_pretrained(
        str(args.checkpoint), dtype=torch.float32, device_map=args.device, attn_implementation="sdpa"
    )
    model = wrapper.model
    audio, rate_hz = soundfile.read(args.reference, dtype="float32")
    speaker = model.extract_speaker_embedding(audio, rate_hz).clone()
    corpus = load_corpus(args.codes, wrapper.processor.tokenizer, model.config, args.device)
    add_dropout(model.talker, args.dropout)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    run = Run(model.talker, corpus, speaker, args.batch, Noise(), generator)
    if args.base_steps:
        train_base(run, model, args)
    else:
        fit_lora(run, model, args, args.out)


if __name__ == "__main__":
    main()
