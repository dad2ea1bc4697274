"""Tokens a second of the OuteTTS rollout against Hugging Face `generate`, side by side on random weights.

    python -m benchmarks.outetts_rollout --size 1b --device cuda --batch 8 32 --prompt 1200 --tokens 400

Both sample at temperature 0.7 without an end token, so that every row takes the same number of steps; the better of
`--repeats` runs after one to warm up. `generate` is measured with its default cache and with its static one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swaralign.params import SamplingParams
from swaralign.policy.outetts import sample_completions
from swaralign.policy.outetts_rollout import Prompt

NO_END = -1  # no token has this id
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"vocab_size": 134_400, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "micro": {"vocab_size": 1400, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="micro")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    config = LlamaConfig(**SHAPES[args.size], max_position_embeddings=8192, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(args.device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).eval()
    print("| batch | generate, tokens/s | generate with static cache | this rollout | of the better generate |")
    print("|---|---|---|---|---|")
    rows = []
    for batch in args.batch:
        ids = torch.randint(config.vocab_size, (batch, args.prompt), device=args.device)
        grown, static, rolled = (
            batch * args.tokens / seconds(run, args.device, args.repeats)
            for run in (lambda ids=ids: generate(model, ids, args.tokens, None),
                        lambda ids=ids: generate(model, ids, args.tokens, "static"),
                        lambda ids=ids: ours(model, ids, args.tokens))
        )
        ratio = rolled / max(grown, static)
        print(f"| {batch} | {grown:.0f} | {static:.0f} | {rolled:.0f} | {ratio:.2f} x |", flush=True)
        rows.append({"batch": batch, "generate": grown, "generate_static": static, "rollout": rolled, "ratio": ratio})
    print(json.dumps({"size": args.size, "device": args.device, "unit": "tokens/s", "rows": rows}))


def generate(model: Any, ids: torch.Tensor, tokens: int, cache: str | None) -> None:
    """Transformers' own loop."""
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.7, top_k=0, top_p=1.0,
                   max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
                   cache_implementation=cache)


def ours(model: Any, ids: torch.Tensor, tokens: int) -> None:
    """The rollout of the voice, its snapshot of the weights included; rows of equal length."""
    prompts = [Prompt(row, tokens, seed) for seed, row in enumerate(ids.tolist())]
    sample_completions(model, prompts, NO_END, SamplingParams(temperature=0.7, top_k=0, top_p=1.0), len(prompts))


def seconds(run: Callable[[], None], device: str, repeats: int) -> float:
    """The shortest of several runs after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


if __name__ == "__main__":
    main()
