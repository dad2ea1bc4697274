"""Reward and error rates of a voice, bare or with an adapter, on the demo's held-out prompts.

Prompts, draws, sampling and scoring are those of `evaluate@base` and `evaluate@sft`, all from params.yaml; the voice
itself need not be pinned there, so that candidates can be compared before one is.

    python -m tools.micro_voice.measure --checkpoint data/demo/base --adapter data/demo/sft_adapter_mlx
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from swaralign.assets import resolve, resolve_file
from swaralign.audio import resample
from swaralign.corpus import read_rows
from swaralign.evaluation import evaluate_takes, summarise
from swaralign.mlx_lora import read_adapter
from swaralign.params import Params, SpeakerParams, SplitParams, load_params
from swaralign.policy import load_policy
from swaralign.rewards.asr import Transcriber
from swaralign.rewards.scorer import Scorer
from swaralign.speaker import EXTRACTOR_HZ, extract, read_reference
from swaralign.split import collect, prompt_id
from tools.micro_voice.lora import save_merged


@contextmanager
def with_adapter(checkpoint: Path, adapter: Path | None, params: Params) -> Iterator[Path]:
    """A checkpoint folder with the mlx-lm adapter, if any, merged in; gone after the block."""
    if adapter is None or params.merge is None:
        yield checkpoint
        return
    with TemporaryDirectory() as folder:
        merged = Path(folder) / "merged"
        save_merged(merged, checkpoint, read_adapter(adapter, checkpoint, params.merge))
        yield merged


def held_out(params: Params) -> list[dict[str, str]]:
    """The prompts {"id", "text"} that the evaluation asks for, by the rules and ids of the split."""
    if not isinstance(params.split, SplitParams):
        raise ValueError(f"split.source is {params.split.source}; the micro voice is measured on its corpus")
    _, validation = collect(read_rows([resolve_file("prompts", params.assets)]), params.split)
    prompts = [{"id": prompt_id(params.split.id_prefix, p.source_index), "text": p.text} for p in validation.prompts]
    return prompts[: params.evaluate.prompts]


def measure(checkpoint: Path, params: Params) -> dict[str, Any]:
    """The summary of the voice's takes; see `summarise`."""
    runtime, wanted = params.runtime, params.evaluate
    asr = Transcriber(resolve("asr", params.assets), params.reward.asr, runtime.threads, runtime.device)
    torch.set_num_threads(runtime.threads)  # loading CTranslate2 after torch has worked leaves torch with one
    if not isinstance(params.speaker, SpeakerParams):
        raise ValueError(f"speaker.kind is {params.speaker.kind}; the micro voice speaks as an x_vector")
    wave, sample_rate_hz = read_reference(resolve_file("reference", params.assets), params.speaker)
    speaker = extract(resample(wave, sample_rate_hz, EXTRACTOR_HZ), checkpoint)
    policy = load_policy(checkpoint, speaker, params.rollout, runtime)
    scorer = Scorer(params.reward, asr)
    draws, seed, sampling = wanted.samples_per_prompt, wanted.seed, wanted.sampling
    batch_size = params.rollout.batch_size
    return summarise(evaluate_takes(policy, held_out(params), draws, seed, sampling, scorer, batch_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="mlx-lm adapter folder")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    args = parser.parse_args()
    params = load_params(args.params)
    torch.set_num_threads(params.runtime.threads)
    with with_adapter(args.checkpoint, args.adapter, params) as checkpoint:
        summary = measure(checkpoint, params)
    for name, value in summary.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
