"""`reward.kind: http` on the demo recipe: the local scorer's scores, take by take; scorers that give a score alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from swaralign.checks import engines
from swaralign.comparison import Evaluation, compare
from swaralign.evaluation import evaluate_takes, summarise
from swaralign.params import Params, SamplingParams, parse_params
from swaralign.rewards.composite import mos_term, speaker_similarity_term
from swaralign.rewards.scorer import Scorer, TakeScore, load_local, load_scorer
from swaralign.rewards.text import normalise
from swaralign.scoring import AudioTake
from swaralign.scoring.messages import encode_take
from swaralign.scoring.served import RewardScorer, load_reward
from tests.scorers import Seconds
from tests.scoring import Scripted, http, process, request, served, settings
from tests.speech import RATE_HZ, Playback, clips, demo_params

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "recipes" / "demo.yaml"
CLIPS = 4
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def remote_params(url: str, **changes: Any) -> Params:
    """The demo recipe with its reward behind a URL."""
    data = demo_params().model_dump()
    data["reward"] |= {"kind": "http", "http": settings(url, timeout_s=120.0, **changes).model_dump()}
    return parse_params(data)


def takes() -> dict[str, Any]:
    """Clips of the demo corpus, one that was cut off, and takes that fail the guard, in between."""
    texts, waves = map(list, zip(*clips(CLIPS), strict=True))
    waves.insert(1, np.zeros(RATE_HZ, np.float32))
    waves.insert(3, np.full(RATE_HZ, np.nan, np.float32))
    waves += [np.zeros(0, np.float32), waves[0]]
    texts = [*texts[:1], "silence", *texts[1:2], "nothing", *texts[2:], "no sound", "cut off"]
    truncated = [text == "cut off" for text in texts]
    return {"waves": waves, "texts": texts, "truncated": truncated, "sample_rate_hz": RATE_HZ}


@pytest.fixture(scope="module")
def local() -> Scorer:
    return load_local(demo_params(), None, every_metric=True, root=ROOT)


@pytest.fixture(scope="module")
def whisper_cer() -> RewardScorer:
    return load_reward("whisper_cer", DEMO, root=ROOT)


@pytest.fixture(scope="module")
def scores(local: Scorer) -> list[TakeScore]:
    return local.score(**takes())


def test_scores_are_the_local_ones_take_by_take(scores: list[TakeScore]) -> None:
    with process("composite", "--params", str(DEMO)) as server:
        remote = load_scorer(remote_params(server.url, transcripts=True), every_metric=True)
        remote.check([{"id": "p-1", "text": "Hello."}])
        assert remote.score(**takes()) == scores
    assert sum(score.failed for score in scores) == 4
    assert len({score.composite for score in scores}) > 2
    assert all(score.mos and score.speaker_similarity for score in scores if not score.failed)


def test_the_reply_of_whisper_cer_has_the_published_fields(whisper_cer: RewardScorer, scores: list[TakeScore]) -> None:
    text, wave = clips(1)[0]
    body = encode_take(AudioTake(wave, RATE_HZ, text, {"id": "s-1"}))
    with served(lambda: whisper_cer) as url:
        reply = httpx.post(f"{url}/score", content=body, timeout=60).json()
    assert reply["score"] == 1 - reply["cer_capped"]
    assert (reply["cer"], reply["asr_text"], reply["sample_id"]) == (scores[0].cer, scores[0].transcript, "s-1")
    assert reply["normalized_target"] == normalise(text, "english")
    assert reply["normalized_hypothesis"] == normalise(str(scores[0].transcript), "english")
    assert "mos" not in reply and "speaker_similarity" not in reply


def test_the_parts_are_served_as_the_composite_has_them(scores: list[TakeScore]) -> None:
    text, wave = clips(1)[0]
    take = AudioTake(wave, RATE_HZ, text, {})
    mos, = load_reward("mos", DEMO, root=ROOT).score([take])
    similarity, = load_reward("speaker_similarity", DEMO, root=ROOT).score([take])
    assert (mos["score"], mos["mos"]) == (mos_term(scores[0].mos or 0), scores[0].mos)
    assert similarity["score"] == speaker_similarity_term(scores[0].speaker_similarity or 0)
    assert mos["cer"] is None and "asr_text" not in mos  # nobody listened


def test_our_rewards_refuse_what_is_no_speech(whisper_cer: RewardScorer) -> None:
    wave = np.full(2400, 0.1, np.float32)
    for take, told in ((AudioTake(wave, 8, "Hello.", {}), "sample_rate is 8 Hz, outside 4000 to 384000"),
                       (AudioTake(wave * 32768, 24000, "Hello.", {}), "peaks at 3276.8; it must be in [-1, 1], so div"),
                       (AudioTake(wave, 24000, "(" * 2001, {}), "the prompt has 2001 characters, 2000 are the most"),
                       (AudioTake(wave, 24000, "Hmm.", {}), "the text 'Hmm.' is empty after the english rule")):
        with pytest.raises(ValueError) as caught:
            whisper_cer.check(take)
        assert told in str(caught.value)
    whisper_cer.check(AudioTake(wave, 24000, "Hello.", {}))


@given(prompt=st.text(max_size=40) | st.text("0123456789.,$£%/-+: ofhalpintzr", max_size=40))
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_can_be_compared_or_is_refused(whisper_cer: RewardScorer, prompt: str) -> None:
    with contextlib.suppress(ValueError):
        whisper_cer.check(AudioTake(np.full(2400, 0.1, np.float32), 24000, prompt, {}))


def test_takes_of_several_rates_keep_their_order(whisper_cer: RewardScorer) -> None:
    batch = [AudioTake(wave[:: 2 if index % 2 else 1], RATE_HZ // (2 if index % 2 else 1), text, {})
             for index, (text, wave) in enumerate(clips(4))]
    alone = [whisper_cer.score([take])[0] for take in batch]
    assert whisper_cer.score(batch) == alone
    assert [reply["normalized_target"] for reply in alone] == [normalise(text, "english") for text, _ in clips(4)]


def test_a_failed_take_goes_to_nobody_and_gets_the_worst_score() -> None:
    with Scripted(http(200, b'{"score": 9.5, "mos": 3.5}')) as server:
        scorer = load_scorer(remote_params(server.url, failed_score=-2.0))
        scores = scorer.score(**takes())
    assert len(server.requests) == CLIPS
    assert [score.composite for score in scores] == [9.5, -2.0, 9.5, -2.0, 9.5, 9.5, -2.0, -2.0]
    assert [score.flags for score in scores if score.failed] == [
        ("silent",), ("nonfinite",), ("empty",), ("truncated",)]
    assert {score.mos for score in scores} == {3.5, None}
    assert all(score.wer is score.cer is score.wer_edits is score.transcript is None for score in scores)


def test_ids_are_unique_in_the_run_and_metadata_are_scalars() -> None:
    with Scripted(http(200)) as server:
        scorer = load_scorer(remote_params(server.url))
        for _ in range(2):
            scorer.score(**takes())
    metadata = [sent["metadata"] for sent in server.requests]
    assert all(list(each) == ["id"] and isinstance(each["id"], str) for each in metadata)
    assert len({each["id"] for each in metadata}) == 2 * CLIPS
    assert server.requests[0].keys() == request().keys()


def test_a_text_that_cannot_be_scored_is_told_before_the_scorer_is_asked() -> None:
    with Scripted(http(500)) as server, pytest.raises(ValueError, match=r"prompt p-2: the text 'Hmm\.' is empty"):
        load_scorer(remote_params(server.url)).check([{"id": "p-2", "text": "Hmm."}])
    assert server.requests == []


def test_evaluation_and_comparison_leave_out_what_a_scorer_does_not_measure() -> None:
    voice = Playback(dict(clips(3)) | {"a quiet mouse": np.zeros(RATE_HZ, np.float32)})
    prompts = [{"id": f"p-{index}", "text": text} for index, text in enumerate(voice.waves)]
    with served(Seconds) as url:
        scorer = load_scorer(remote_params(url, failed_score=-9.0))
        table = evaluate_takes(voice, prompts, draws=2, seed=1, sampling=SAMPLING, scorer=scorer, batch_size=8)
    summary = summarise(table)
    assert summary["composite"] == pytest.approx(np.mean([row["composite"] for row in table.to_pylist()]))
    assert table.column("composite").to_pylist()[0] == len(clips(1)[0][1]) / RATE_HZ - 3.0
    assert [summary[name] for name in ("wer_corpus", "wer_mean", "cer_corpus", "cer_mean", "mos")] == [None] * 5
    assert summary["failed"] == 2
    voices = {voice: Evaluation(table, {"settings": {}}) for voice in ("sft", "grpo")}
    result = compare(voices, "sft", demo_params().compare)
    assert list(result["grpo"]) == list(result["grpo_minus_sft"]) == ["composite", "failure_rate", "duration_s"]


def test_check_names_who_scores() -> None:
    assert engines(remote_params("http://h:1").reward).found == "none here: scored by http://h:1"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"urls": ["http://h:1/score"]}, "urls: http://h:1/score must be what comes before /score: http://h:1"),
        ({"urls": ["http://h:1/"]}, "urls: http://h:1/ must be what comes before /score: http://h:1"),
        ({"urls": ["http://me:secret@h:1"]}, "reward.http.urls.0: http://me:secret@h:1 is not the URL of a scorer"),
        ({"urls": ["h:1"]}, "reward.http.urls.0: h:1 is not the URL of a scorer; as http://127.0.0.1:18080 or http:"),
        ({"urls": ["http://h:1", "http://h:1"]}, "names one twice; raise concurrency instead"),
        ({"urls": []}, "kind is http, but http.urls is empty: name a scorer"),
        ({"timeout_s": 0.0}, "reward.http.timeout_s: Input should be greater than 0"),
        ({"token": "s3cret"}, "reward.http.token: unknown key; did you mean 'token_env'?"),
    ],
)
def test_faulty_params(demo: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    demo["reward"] |= {"kind": "http", "http": demo["reward"]["http"] | changes}
    with pytest.raises(ValueError) as caught:
        parse_params(demo)
    assert told in str(caught.value)
