"""Rollout, replay and prompt layout of the codec-0 policy, on the micro base checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.plain_rollout import plain_rollout
from swaralign.params import Params, PredictorParams, SamplingParams, load_params
from swaralign.policy import load_policy
from swaralign.policy.base import Take
from swaralign.policy.codec_model import LORA_TARGETS, CodecPolicy
from swaralign.policy.engine import RolloutEngine
from swaralign.policy.prompt import embed_prefill, prefill_rows
from swaralign.policy.qwen3_tts import Qwen3TtsVoice
from swaralign.policy.sampling import draw, probabilities
from swaralign.policy.slots import Frames, Prompt
from swaralign.training.common import save_adapter

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data" / "demo" / "base"
TEXTS = [
    "Do you like red cars?",
    "The weather in London is sunny today.",
    "My brother bought a blue book.",
    "We need two apples and five tickets.",
    "The train to Paris leaves at nine.",
]
PLAIN = SamplingParams(temperature=0.9, top_k=0, top_p=1.0)


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "recipes" / "demo.yaml")


def new_voice(params: Params, language: str) -> Qwen3TtsVoice:
    torch.set_num_threads(2)
    speaker = torch.randn(256, generator=torch.Generator().manual_seed(5)) * 0.15
    rollout = params.rollout.model_copy(update={"language": language})
    return load_policy(BASE, speaker.tolist(), rollout, params.runtime)


@pytest.fixture(scope="module")
def voice(params: Params) -> Qwen3TtsVoice:
    return new_voice(params, "auto")


@pytest.fixture(scope="module")
def takes(voice: Qwen3TtsVoice) -> list[Take]:
    return voice.rollout(TEXTS, range(len(TEXTS)), PLAIN)


def flat_batch(voice: Qwen3TtsVoice, takes: list[Take], texts: list[str]) -> tuple[Tensor, Tensor, int]:
    """Prompts left-padded, completions right-padded, as TRL's GRPO trainer lays them out."""
    prompts, completions = [voice.encode(text) for text in texts], [take.completion_ids for take in takes]
    width, length = max(map(len, prompts)), max(map(len, completions))
    ids = torch.full((len(takes), width + length), voice.config.talker_config.codec_pad_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width : width + len(completion)] = torch.from_numpy(completion)
        mask[row, width - len(prompt) : width + len(completion)] = 1
    return ids, mask, width


def replay(voice: Qwen3TtsVoice, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """(B, L - 1) log-probability of each next flat id, by the trained model's forward and head."""
    states = voice.model(ids, mask).last_hidden_state
    head = voice.model.get_output_embeddings()
    logits = (states @ head.weight.T + head.bias) / temperature
    targets = ids[:, 1:].clamp(max=logits.shape[-1] - 1)  # prompt ids lie beyond the head; nothing reads them
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, targets[..., None])[..., 0]


def test_prefill_equals_what_official_generate_feeds_the_talker(voice: Qwen3TtsVoice) -> None:
    seen: list[Tensor] = []

    def record(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["inputs_embeds"])

    handle = voice.model.talker.model.register_forward_pre_hook(record, with_kwargs=True)
    ids = voice.text_ids(TEXTS[1])
    prompt = {"ref_spk_embedding": [voice.model.speaker], "ref_code": None, "x_vector_only_mode": [True],
              "icl_mode": [False]}
    official = super(type(voice.model), voice.model).generate
    official(input_ids=[torch.tensor([ids])], voice_clone_prompt=prompt, languages=["auto"], non_streaming_mode=True,
             max_new_tokens=2)
    handle.remove()
    text, codec = prefill_rows(voice.config, ids, voice.model.codec_prefix)
    ours = embed_prefill(voice.model.talker, torch.tensor(text), torch.tensor(codec), voice.model.speaker)
    assert len(text) == len(ids) + 2
    torch.testing.assert_close(ours, seen[0][0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "predictor"),
    [
        (PLAIN, PredictorParams(temperature=0.5, top_k=0, top_p=1.0)),
        (SamplingParams(temperature=1.0, top_k=50, top_p=0.95), PredictorParams(temperature=0.9, top_k=20, top_p=0.9)),
        (PLAIN, PredictorParams(temperature=0.0, top_k=0, top_p=1.0)),
    ],
)
def test_engine_equals_plain_loop_over_official_modules(
    voice: Qwen3TtsVoice, sampling: SamplingParams, predictor: PredictorParams
) -> None:
    prompts = [voice.prompt(text, seed) for text, seed in zip(TEXTS, range(10, 15), strict=True)]
    takes = RolloutEngine(voice.model, voice.model.speaker, predictor).rollout(prompts, sampling, batch=3)
    for prompt, take in zip(prompts, takes, strict=True):
        plain = plain_rollout(voice.model, voice.model.speaker, prompt, sampling, predictor)
        assert np.array_equal(take.codes, plain.codes) and take.ended is plain.ended
        assert len(take.log_probs) == len(take.codes) + take.ended


def test_engine_equals_plain_loop_with_a_live_adapter(params: Params) -> None:
    """In training the weights are base plus adapter: the engine's snapshot must hold both."""
    voice = new_voice(params, "auto")
    bare = voice.rollout(TEXTS[:2], [4, 5], PLAIN)
    torch.manual_seed(1)
    adapted = get_peft_model(voice.model, LoraConfig(r=4, lora_alpha=12, target_modules=LORA_TARGETS)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    for text, seed, before in zip(TEXTS[:2], [4, 5], bare, strict=True):
        take = voice.rollout([text], [seed], PLAIN)[0]
        plain = plain_rollout(voice.model, voice.model.speaker, voice.prompt(text, seed), PLAIN,
                              voice.settings.predictor)
        assert np.array_equal(take.completion_ids[: take.frames * 16].reshape(-1, 16), plain.codes)
        assert not np.array_equal(take.completion_ids, before.completion_ids)
    with adapted.disable_adapter():
        assert np.array_equal(voice.rollout(TEXTS[:1], [4], PLAIN)[0].completion_ids, bare[0].completion_ids)


def test_engine_equals_plain_loop_where_talker_and_predictor_are_equally_wide(
    voice: Qwen3TtsVoice, params: Params
) -> None:
    """As at 0.6B, where the projection between them is an identity without weights."""
    config = copy.deepcopy(voice.config)
    config.talker_config.code_predictor_config.hidden_size = config.talker_config.hidden_size
    torch.manual_seed(0)
    model = CodecPolicy(config).eval()
    assert isinstance(model.talker.code_predictor.small_to_mtp_projection, torch.nn.Identity)
    text, codec = prefill_rows(config, voice.text_ids(TEXTS[0]), voice.model.codec_prefix)
    prompt = Prompt(text, codec, budget=6, seed=3)
    frames = RolloutEngine(model, model.speaker, params.rollout.predictor).rollout([prompt], PLAIN)[0]
    plain = plain_rollout(model, model.speaker, prompt, PLAIN, params.rollout.predictor)
    assert len(plain.codes) == 6 and np.array_equal(frames.codes, plain.codes)


def test_a_layer_that_the_loops_do_not_divide_is_refused(voice: Qwen3TtsVoice, params: Params) -> None:
    config = copy.deepcopy(voice.config)
    config.talker_config.intermediate_size = 500
    model = CodecPolicy(config).eval()
    with pytest.raises(ValueError, match=r"a multiple of 8, but this checkpoint has \{'down': 500\}; set"):
        RolloutEngine(model, model.speaker, params.rollout.predictor).rollout([voice.prompt(TEXTS[0], 1)], PLAIN)


def engine_takes(voice: Qwen3TtsVoice, order: list[int], batch: int | None) -> list[Frames]:
    """Takes of TEXTS, sampled in another order, put back into the old one."""
    prompts = [voice.prompt(TEXTS[i], i) for i in order]
    engine = RolloutEngine(voice.model, voice.model.speaker, voice.settings.predictor)
    takes = engine.rollout(prompts, PLAIN, batch)
    return [takes[order.index(i)] for i in range(len(order))]


@pytest.mark.parametrize(("order", "batch"), [([0, 1, 2, 3, 4], 2), ([4, 2, 0, 3, 1], None), ([3, 4, 1, 0, 2], 1)])
def test_a_take_depends_on_its_seed_alone(voice: Qwen3TtsVoice, order: list[int], batch: int | None) -> None:
    """Not on its neighbours, its place in the batch, or when a slot became free for it."""
    together = engine_takes(voice, [0, 1, 2, 3, 4], None)
    assert len({len(take.codes) for take in together}) > 1
    for take, other in zip(together, engine_takes(voice, order, batch), strict=True):
        assert np.array_equal(take.codes, other.codes) and take.ended is other.ended
        assert np.array_equal(take.log_probs, other.log_probs)  # to the bit


def test_a_group_reads_its_prompt_once_and_each_take_is_as_if_alone(voice: Qwen3TtsVoice) -> None:
    engine = RolloutEngine(voice.model, voice.model.speaker, voice.settings.predictor)
    texts, seeds = [0, 0, 1, 0, 1], [3, 4, 3, 5, 6]
    prompts = [voice.prompt(TEXTS[text], seed) for text, seed in zip(texts, seeds, strict=True)]
    read: list[int] = []
    prefill = engine.trunk.prefill
    engine.trunk.prefill = lambda *given: read.append(len(given[-1])) or prefill(*given)  # type: ignore[method-assign]
    group = engine.rollout(prompts, PLAIN)
    assert read == [1, 1]
    for prompt, take in zip(prompts, group, strict=True):
        alone = engine.rollout([prompt], PLAIN)[0]
        assert np.array_equal(take.codes, alone.codes) and np.array_equal(take.log_probs, alone.log_probs)


def test_another_seed_is_another_take(voice: Qwen3TtsVoice, takes: list[Take]) -> None:
    other = voice.rollout(TEXTS[2:3], [99], PLAIN)[0]
    assert not np.array_equal(other.completion_ids, takes[2].completion_ids)


@pytest.mark.parametrize("language", ["auto", "english"])
def test_replay_equals_rollout_over_a_padded_batch(params: Params, language: str) -> None:
    """Log-probabilities by replay equal those that the sampler drew from, end of speech included."""
    voice = new_voice(params, language)
    takes = voice.rollout(TEXTS, range(len(TEXTS)), PLAIN)
    assert len({take.frames for take in takes}) > 1 and not all(take.truncated for take in takes)
    ids, mask, width = flat_batch(voice, takes, TEXTS)
    with torch.no_grad():
        replayed = replay(voice, ids, mask, PLAIN.temperature)
    for row, (take, sampled) in enumerate(zip(takes, engine_takes(voice, [0, 1, 2, 3, 4], None), strict=True)):
        columns = [width + 16 * frame - 1 for frame in range(len(sampled.log_probs))]
        assert np.array_equal(sampled.codes.reshape(-1), take.completion_ids[: 16 * take.frames])
        assert len(columns) == take.frames + (not take.truncated)
        torch.testing.assert_close(replayed[row, columns], torch.from_numpy(sampled.log_probs), atol=1e-5, rtol=0)


def test_only_policy_tokens_have_a_state(voice: Qwen3TtsVoice, takes: list[Take]) -> None:
    """A flat position before an environment token holds a zero state, so nothing can be learnt there."""
    ids, mask, width = flat_batch(voice, takes, TEXTS)
    states = voice.model(ids, mask).last_hidden_state
    live = states.abs().sum(-1) > 0
    for row, take in enumerate(takes):
        expected = torch.zeros(ids.shape[1], dtype=torch.bool)
        expected[torch.arange(take.frames + (not take.truncated)) * 16 + width - 1] = True
        assert torch.equal(live[row], expected)


def test_environment_tokens_get_no_gradient(voice: Qwen3TtsVoice, takes: list[Take]) -> None:
    ids, mask, width = flat_batch(voice, takes[:2], TEXTS[:2])
    weight = voice.model.talker.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    log_probs = replay(voice, ids, mask, 1.0)
    environment = torch.zeros_like(log_probs)
    for row, take in enumerate(takes[:2]):
        environment[row, width - 1 : width - 1 + len(take.policy_mask)] = torch.from_numpy(~take.policy_mask).float()
    gradient, = torch.autograd.grad((log_probs * environment).sum(), weight, retain_graph=True)
    policy_gradient, = torch.autograd.grad((log_probs * (1 - environment)).sum(), weight)
    assert environment.sum() == 15 * sum(take.frames for take in takes[:2])
    assert gradient.abs().max() == 0 and policy_gradient.abs().max() > 0


def test_a_fully_masked_completion_still_has_a_gradient_path(voice: Qwen3TtsVoice, takes: list[Take]) -> None:
    ids, mask, width = flat_batch(voice, takes[:1], TEXTS[:1])
    mask[:, width:] = 0
    states = voice.model(ids, mask).last_hidden_state
    assert states.requires_grad


def test_four_frame_toy_labels_are_shifted_once(voice: Qwen3TtsVoice) -> None:
    """The state at flat column c0 + 16 f - 1 is the talker's state of short position P - 1 + f."""
    codes = np.arange(64).reshape(4, 16) % 128
    take = Take(np.append(codes.reshape(-1), voice.config.talker_config.codec_eos_token_id),
                np.append(np.tile([True] + [False] * 15, 4), True), 4, False, 0)
    ids, mask, width = flat_batch(voice, [take], TEXTS[:1])
    with torch.no_grad():
        row = voice.model._parse(ids[0][mask[0].bool()], 0)
        short = voice.model._run([row])[0]
        flat = voice.model(ids, mask).last_hidden_state[0]
    for frame in range(5):
        assert torch.equal(flat[width + 16 * frame - 1, :256], short[row.prefill - 1 + frame])
    assert flat[:, 256].nonzero()[:, 0].tolist() == [width - 1, width + 15]


def test_a_take_that_never_ends_is_truncated_at_its_budget(voice: Qwen3TtsVoice, params: Params) -> None:
    short = params.rollout.model_copy(update={"base_frames": 2, "frames_per_token": 0.5, "max_frames": 4})
    clipped = Qwen3TtsVoice(voice.model, voice.tokenizer, short)
    take = clipped.rollout(TEXTS[:1], [1], PLAIN)[0]
    assert take.truncated and take.frames == 4 and len(take.completion_ids) == 64


def test_decoding_a_batch_equals_decoding_each_take(voice: Qwen3TtsVoice, takes: list[Take]) -> None:
    voice.decode_frames = 10_000
    together = voice.decode(takes)
    voice.decode_frames = 1
    for take, wave in zip(takes, together, strict=True):
        alone = voice.decode([take])[0]
        assert len(wave) == take.frames * 1920 and wave.dtype == np.float32
        np.testing.assert_allclose(wave, alone, atol=1e-5)
    empty = Take(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), 0, True, 0)
    assert len(voice.decode([empty])[0]) == 0


def test_bad_input_is_named(voice: Qwen3TtsVoice, params: Params) -> None:
    with pytest.raises(ValueError, match="needs words to speak, found '  '"):
        voice.encode("  ")
    with pytest.raises(ValueError, match=r"'hindi'.*auto, english"):
        Qwen3TtsVoice(voice.model, voice.tokenizer, params.rollout.model_copy(update={"language": "hindi"}))
    with pytest.raises(ValueError, match="has 3 numbers, the talker takes 256"):
        voice.model.set_speaker([1.0, 2.0, 3.0])


def test_draw_inverts_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).repeat(4, 1)
    drawn = draw(logits, torch.tensor([0.1, 0.3, 0.69, 0.999999]), 1.0, 0, 1.0)
    assert drawn.tolist() == [0, 1, 1, 2]
    assert draw(logits, torch.zeros(4), 0.0, 0, 1.0).tolist() == [1, 1, 1, 1]


def test_probabilities_match_transformers_warpers() -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(6, 80, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)])
    expected = torch.softmax(warpers(torch.zeros(6, 1, dtype=torch.long), logits), dim=-1)
    torch.testing.assert_close(probabilities(logits, 0.7, 20, 0.8), expected)


def test_a_loaded_adapter_speaks(params: Params, voice: Qwen3TtsVoice, takes: list[Take], tmp_path: Path) -> None:
    """An adapter that is zero, saved and loaded around the model as evaluation does, changes no take."""
    config = LoraConfig(r=2, target_modules=LORA_TARGETS)
    save_adapter(get_peft_model(new_voice(params, "auto").model, config), tmp_path)
    adapted = load_policy(BASE, voice.model.speaker.tolist(), params.rollout, params.runtime, tmp_path)
    assert adapted.rollout(TEXTS[:1], [0], PLAIN)[0].completion_ids.tolist() == takes[0].completion_ids.tolist()
