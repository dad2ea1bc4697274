"""The OuteTTS voice on the micro checkpoint: prompts, rollout, replay, repetition penalty, decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from swaralign.params import OuteTtsRolloutParams, RuntimeParams, SamplingParams
from swaralign.policy import load_policy
from swaralign.policy.base import Take
from swaralign.policy.outetts import OuteTtsVoice, sample_completions
from swaralign.policy.outetts_prompt import completion_prompt
from swaralign.policy.outetts_rollout import Completion, Prompt, rollout_batch, snapshot
from swaralign.policy.sampling import uniforms

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data" / "outetts-micro" / "base"
SPEAKER: dict[str, Any] = json.loads((Path(__file__).parent / "data/outetts/speaker.json").read_text(encoding="utf-8"))
SETTINGS = OuteTtsRolloutParams(
    family="outetts", base_tokens=180, tokens_per_text_token=4.0, max_tokens=230, batch_size=3
)
TEXTS = ["The bakery opens early.", "Please put the keys back where you found them.", "Snow!", "Call at 10:30, Dr. B."]
PLAIN = SamplingParams(temperature=0.9, top_k=0, top_p=1.0)


def new_voice() -> OuteTtsVoice:
    torch.set_num_threads(1)
    voice = load_policy(BASE, SPEAKER, SETTINGS, RuntimeParams(device="cpu", threads=1))
    assert isinstance(voice, OuteTtsVoice)
    return voice


@pytest.fixture(scope="module")
def voice() -> OuteTtsVoice:
    return new_voice()


@pytest.fixture(scope="module")
def takes(voice: OuteTtsVoice) -> list[Take]:
    return voice.rollout(TEXTS, range(4), PLAIN)


def plain_rollout(model: Any, prompt: Prompt, eos: int, sampling: SamplingParams) -> Completion:
    """One row on its own, unpadded, with the model's own growing cache, warped by transformers."""
    ids, drawn = list(prompt.ids), list[int]()
    chances = uniforms([prompt.seed], prompt.budget, 1)[0, :, 0]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    cache, fresh = DynamicCache(), ids
    for step in range(prompt.budget):
        with torch.no_grad():
            logits = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True).logits[0, -1]
        for token in set(ids[-64:]):
            penalty = sampling.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        chance = torch.softmax(warpers(torch.tensor([ids]), logits[None]), -1)[0].cumsum(0)
        token = int((chance <= chances[step] * chance[-1]).sum())
        ids.append(token)
        drawn.append(token)
        fresh = [token]
        if token == eos:
            return Completion(np.array(drawn), True)
    return Completion(np.array(drawn), False)


def test_prompt_ids_are_those_of_the_prompt(voice: OuteTtsVoice) -> None:
    ids = voice.encode(TEXTS[3])
    assert voice.tokenizer.decode(ids) == completion_prompt(TEXTS[3], voice.profile)
    special = [token for token in voice.tokenizer.convert_ids_to_tokens(ids) if token.startswith("<|")]
    assert special[:4] == ["<|im_start|>", "<|text_start|>", "<|text_end|>", "<|audio_start|>"]
    assert special[-1] == "<|word_start|>" and special.count("<|word_start|>") == len(SPEAKER["words"]) + 1
    frames = sum(len(word["c1"]) for word in SPEAKER["words"])
    assert voice.codes.parse(np.array(ids)).shape == (2, frames)


@pytest.mark.parametrize("sampling", [
    PLAIN,
    SamplingParams(temperature=1.2, top_k=40, top_p=0.9, repetition_penalty=1.1),
], ids=["plain", "everything on"])
def test_rollout_equals_a_plain_loop(voice: OuteTtsVoice, sampling: SamplingParams) -> None:
    """Rows of several lengths side by side, some of which end: each equals itself alone, token for token."""
    for text, seed, take in zip(TEXTS, range(4), voice.rollout(TEXTS, range(4), sampling), strict=True):
        prompt = Prompt(voice.encode(text), voice.token_budget(text), seed)
        plain = plain_rollout(voice.model, prompt, voice.eos, sampling)
        assert np.array_equal(take.completion_ids, plain.ids) and take.truncated is not plain.ended


def test_rollout_equals_a_plain_loop_where_prompts_are_shorter_than_the_penalty_window(voice: OuteTtsVoice) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.5)
    prompts = [Prompt(list(range(40, 40 + length)), 30, length) for length in (2, 30, 60)]
    for prompt, completion in zip(prompts, rollout_batch(voice.model, prompts, voice.eos, sampling), strict=True):
        assert np.array_equal(completion.ids, plain_rollout(voice.model, prompt, voice.eos, sampling).ids)


def test_a_take_depends_on_its_seed_alone(voice: OuteTtsVoice, takes: list[Take]) -> None:
    for index in (1, 3):
        alone = voice.rollout([TEXTS[index]], [index], PLAIN)[0]
        assert np.array_equal(alone.completion_ids, takes[index].completion_ids)
    other = voice.rollout([TEXTS[1]], [99], PLAIN)[0]
    assert not np.array_equal(other.completion_ids, takes[1].completion_ids)


def test_take_ends_or_is_truncated_at_its_budget(voice: OuteTtsVoice) -> None:
    takes = voice.rollout(TEXTS * 2, range(8), PLAIN)
    assert {take.truncated for take in takes} == {True, False}
    for text, take in zip(TEXTS * 2, takes, strict=True):
        budget = voice.token_budget(text)
        assert len(take.completion_ids) == budget if take.truncated else take.completion_ids[-1] == voice.eos
        assert (take.completion_ids[:-1] != voice.eos).all() and len(take.completion_ids) <= budget
        assert take.policy_mask.all() and len(take.policy_mask) == len(take.completion_ids)


def replay(model: Any, prompts: list[list[int]], takes: list[Take], pad: int, temperature: float) -> list[Tensor]:
    """Log-probabilities of the completions as TRL computes them: prompts left-padded, completions right-padded."""
    width, length = max(map(len, prompts)), max(len(take.completion_ids) for take in takes)
    ids = torch.full((len(takes), width + length), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, take) in enumerate(zip(prompts, takes, strict=True)):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width : width + len(take.completion_ids)] = torch.from_numpy(take.completion_ids)
        mask[row, width - len(prompt) : width + len(take.completion_ids)] = 1
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids, attention_mask=mask).logits[:, :-1] / temperature, -1)
    picked = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    return [picked[row, width - 1 :][: len(take.completion_ids)] for row, take in enumerate(takes)]


def test_replay_equals_rollout_over_a_padded_batch(voice: OuteTtsVoice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainers compute for a take is what the sampler drew it from, the end token included."""
    import swaralign.policy.outetts_rollout as engine

    seen: list[Tensor] = []
    draw = engine.draw

    def record(logits: Tensor, uniform: Tensor, *settings: Any) -> Tensor:
        token = draw(logits, uniform, *settings)
        seen.append(torch.log_softmax(logits / PLAIN.temperature, -1).gather(-1, token[:, None])[:, 0])
        return token

    monkeypatch.setattr(engine, "draw", record)
    texts = TEXTS[:3]
    takes = voice.rollout(texts, range(5, 8), PLAIN)
    sampled: dict[int, list[float]] = {row: [] for row in range(3)}
    order = sorted(range(3), key=lambda i: (voice.token_budget(texts[i]), len(voice.encode(texts[i]))))
    for step, values in enumerate(seen):
        speaking = [row for row in order if len(takes[row].completion_ids) > step]
        for row, value in zip(speaking, values.tolist(), strict=True):
            sampled[row].append(value)
    pad = voice.trl_tokenizer().pad_token_id
    replayed = replay(voice.model, [voice.encode(text) for text in texts], takes, pad, PLAIN.temperature)
    for row in range(3):
        torch.testing.assert_close(replayed[row], torch.tensor(sampled[row]), atol=1e-4, rtol=0)


def test_rollout_samples_the_live_adapter_and_leaves_the_model_as_it_is() -> None:
    voice = new_voice()
    bare = voice.rollout(TEXTS[:2], [4, 5], PLAIN)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.5, target_modules=voice.lora_targets)
    voice.model = get_peft_model(voice.model, config).train()
    assert len([name for name, _ in voice.model.named_parameters() if "lora_B" in name]) == 2 * 7
    for name, weight in voice.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    before = {name: weight.clone() for name, weight in voice.model.state_dict().items()}
    adapted = voice.rollout(TEXTS[:2], [4, 5], PLAIN)
    assert voice.model.training and all(module.training for module in voice.model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in voice.model.state_dict().items())
    assert any(not np.array_equal(a.completion_ids, b.completion_ids) for a, b in zip(bare, adapted, strict=True))
    for text, seed, take in zip(TEXTS[:2], [4, 5], adapted, strict=True):
        prompt = Prompt(voice.encode(text), voice.token_budget(text), seed)
        assert np.array_equal(take.completion_ids, plain_rollout(voice.model.eval(), prompt, voice.eos, PLAIN).ids)


def test_snapshot_in_another_precision_leaves_the_model_in_its_own(voice: OuteTtsVoice) -> None:
    assert snapshot(voice.model, torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert voice.model.lm_head.weight.dtype == torch.float32


def test_decoding_a_batch_equals_decoding_each_take(voice: OuteTtsVoice, takes: list[Take]) -> None:
    together = voice.decode(takes)
    for take, wave in zip(takes, together, strict=True):
        assert wave.dtype == np.float32 and len(wave) == voice.codec.samples(take.frames)
        np.testing.assert_allclose(wave, voice.decode([take])[0], atol=1e-3)  # random weights amplify rounding
    empty = Take(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), 0, True, 0)
    assert len(voice.decode([empty])[0]) == 0


def test_trl_tokenizer_reads_its_own_ids_back(voice: OuteTtsVoice, takes: list[Take]) -> None:
    tokenizer = voice.trl_tokenizer()
    ids = [*voice.encode(TEXTS[0]), *takes[0].completion_ids.tolist()]
    assert tokenizer("".join(tokenizer.convert_ids_to_tokens(ids)))["input_ids"] == ids
    assert tokenizer.padding_side == "left" and tokenizer.eos_token_id == voice.eos
    assert voice.tokenizer.convert_ids_to_tokens(tokenizer.pad_token_id) == "<|c1_64|>"  # the padding code, no sound


def test_bad_input_is_named(voice: OuteTtsVoice) -> None:
    for text in (" ", "?!", "“”"):
        with pytest.raises(ValueError, match="needs words to speak"):
            voice.encode(text)
    long = SPEAKER | {"words": [SPEAKER["words"][0] | {"duration": 3.5}]}
    with pytest.raises(ValueError, match=r"no <\|t_3\.50\|>"):
        load_policy(BASE, long, SETTINGS, RuntimeParams(device="cpu", threads=1))
    with pytest.raises(ValueError, match="the speaker is not a speaker profile"):
        load_policy(BASE, [0.1, 0.2], SETTINGS, RuntimeParams(device="cpu", threads=1))
    with pytest.raises(ValueError, match=r"need more positions than the model's 4096; lower rollout\.max_tokens"):
        sample_completions(voice.model, [Prompt([1] * 4000, 97, 0)], voice.eos, PLAIN, 1)
