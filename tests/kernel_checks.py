"""The GPU's kernels against plain tensors; `test_kernels.py` runs this file, without a GPU in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from benchmarks.voices import checkpoint_voice
from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.decoder import unit
from swaralign.policy.engine import RolloutEngine
from swaralign.policy.kernels import Residual, attend
from swaralign.policy.kernels import draw as draw_kernel
from swaralign.policy.outetts_cuda import TokenEngine, fits
from swaralign.policy.outetts_rollout import Prompt, rollout_batch, snapshot
from swaralign.policy.sampling import draw

BASE = Path(__file__).resolve().parent.parent / "data" / "demo" / "base"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _on_device() -> object:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("rows", [3, 70])
def test_residual_stream_is_read_normed_and_added_to(rows: int) -> None:
    stream = Residual(rows, 48, torch.float32, DEVICE, floor=0.01)
    table, read, added = torch.randn(90, 48), torch.randn(80, 48).T, torch.randn(48, 64).T
    index, x = torch.randint(90, (rows,)), torch.randn(rows, 64)
    stream.set(table, index)
    torch.testing.assert_close(stream.read(read, torch.empty(rows, 80)), unit(table[index], 0.01) @ read)
    stream.add(x, added)
    total = table[index] + x @ added
    torch.testing.assert_close(stream.total, total, atol=1e-5, rtol=1e-5)
    gate, up = (unit(total, 0.01) @ read).chunk(2, dim=-1)
    torch.testing.assert_close(stream.read(read, torch.empty(rows, 40), gate=True), F.silu(gate) * up)


@pytest.mark.parametrize("position", [[3, 17], [0], [5]])
def test_attention_of_one_token_equals_the_plain_one(position: list[int]) -> None:
    kv_heads, groups, size, length = 2, 2, 32, 20
    keys, values = torch.randn(2, 2, kv_heads, length, size)
    old_keys, old_values = keys.clone(), values.clone()
    qkv, norm, out = torch.randn(2, kv_heads * 4 * size), torch.rand(3, size), torch.empty(2, kv_heads * groups * size)
    angles = torch.outer(torch.arange(length).float(), torch.rand(size // 2))
    attend(qkv, norm, (angles.cos(), angles.sin()), torch.tensor(position), keys, values, out, 0.1)
    for row, at in enumerate(position * (2 // len(position))):
        parts = qkv[row].view(kv_heads, groups + 2, size)
        low, high = (unit(parts[:, :-1], 0.1) * norm).chunk(2, dim=-1)
        cos, sin = angles[at].cos(), angles[at].sin()
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        old_keys[row, :, at], old_values[row, :, at] = turned[:, -1], parts[:, -1]
        shares = torch.softmax(turned[:, :-1] @ old_keys[row, :, : at + 1].transpose(1, 2), dim=-1)
        torch.testing.assert_close(out[row].view(kv_heads, groups, size), shares @ old_values[row, :, : at + 1])
    torch.testing.assert_close(keys, old_keys)
    torch.testing.assert_close(values, old_values)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.9, 0, 1.0), (0.7, 20, 1.0), (1.0, 0, 0.8), (0.9, 50, 0.95), (0.0, 0, 1.0)]
)
def test_draws_equal_the_plain_ones(temperature: float, top_k: int, top_p: float) -> None:
    logits, bias, uniform = torch.randn(4, 300) * 3, torch.zeros(2, 300), torch.rand(4, 5, 4)
    bias[:, -20:], bias[0, 7] = -torch.inf, -torch.inf
    step, rows = torch.tensor([0, 1, 2, 4]), torch.arange(4)
    codes, log_probs = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4)
    for book in (0, 3):
        draw_kernel(logits, bias, step, uniform, codes, log_probs, book, temperature, top_k, top_p, free=2)
    allowed = logits + bias[(step >= 2).long()]
    assert torch.equal(codes[:, 0], draw(allowed, uniform[rows, step, 0], temperature, top_k, top_p))
    assert torch.equal(codes[:, 3], draw(logits, uniform[rows, step, 3], temperature, top_k, top_p))
    expected = torch.log_softmax(allowed / (temperature or 1.0), dim=-1)[rows, codes[:, 0]]
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(LlamaConfig, SamplingParams(temperature=0.9, top_k=0, top_p=1.0)),
     (LlamaConfig, SamplingParams(temperature=0.8, top_k=0, top_p=1.0, repetition_penalty=1.3)),
     (Qwen3Config, SamplingParams(temperature=0.7, top_k=30, top_p=0.95))],
)
def test_completions_of_the_engine_equal_those_of_the_model(kind: Any, sampling: SamplingParams) -> None:
    """In float32, token for token: prompts alike and not, longer than the penalty's window and not, places refilled."""
    torch.manual_seed(3)
    config = kind(vocab_size=1100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, initializer_range=0.2)
    with torch.device("cpu"):
        model: Any = AutoModelForCausalLM.from_config(config).eval()
        if sampling.repetition_penalty > 1:  # with an adapter for once
            model = get_peft_model(model, LoraConfig(r=4, target_modules=r".*_proj"))
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.3)
        plain, ids = snapshot(model, torch.float32), torch.randint(1100, (3, 70)).tolist()
        prompts = [Prompt(row, budget, seed) for seed, (row, budget) in enumerate(
            [(ids[0], 6), (ids[0], 16), (ids[1][:9], 10), (ids[2][:60], 12), (ids[1][:9], 4)])]
        eos = int(rollout_batch(plain, prompts[1:2], -1, sampling)[0].ids[7])  # one that ends a take early
        expected = [rollout_batch(plain, [prompt], eos, sampling)[0] for prompt in prompts]
        takes = TokenEngine(model.to(DEVICE), torch.float32).rollout(prompts, eos, sampling, 3)
    assert any(each.ended for each in expected) and not all(each.ended for each in expected)
    for take, one in zip(takes, expected, strict=True):
        assert take.ended == one.ended and np.array_equal(take.ids, one.ids)


def test_models_that_the_kernels_know() -> None:
    llama = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert fits(LlamaConfig(**llama, head_dim=32)) and fits(Qwen3Config(**llama, head_dim=128))
    for changed in ({"head_dim": 24}, {"head_dim": 16}, {"head_dim": 32, "attention_bias": True},
                    {"head_dim": 32, "hidden_act": "gelu"},
                    {"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
                    {"head_dim": 32, "intermediate_size": 100},
                    {"head_dim": 32, "num_attention_heads": 16, "num_key_value_heads": 1}):
        assert not fits(LlamaConfig(**{**llama, **changed}))
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert not fits(Qwen3Config(**llama, head_dim=32, **windows))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("top_k", [0, 50])
def test_takes_of_a_gpu_equal_those_of_a_cpu(top_k: int) -> None:
    """In float32, token for token, whatever stands beside a take; in bfloat16 at least the latter."""
    sampling = SamplingParams(temperature=0.9, top_k=top_k, top_p=0.95 if top_k else 1.0)
    predictor = PredictorParams(temperature=0.9, top_k=top_k, top_p=1.0)
    with torch.device("cpu"):
        cpu, gpu = (checkpoint_voice(BASE, device, sampling, predictor) for device in ("cpu", "cuda"))
        prompts = [cpu.prompt(seed, 20 + 5 * seed) for seed in range(6)]
        expected = RolloutEngine(cpu.model, cpu.model.speaker, predictor).rollout(prompts, sampling)
        for dtype in (torch.float32, torch.bfloat16):
            engine = RolloutEngine(gpu.model, gpu.model.speaker, predictor, dtype)
            few, all_ = (engine.rollout(prompts, sampling, batch) for batch in (2, None))
            for take, one, other in zip(expected, few, all_, strict=True):
                assert np.array_equal(one.codes, other.codes)
                assert dtype is torch.bfloat16 or np.array_equal(one.codes, take.codes)
