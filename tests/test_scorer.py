"""The scorer: guard, transcript, error rates, reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from swaralign.flags import FAILURES, FLAGS
from swaralign.params import RewardParams, WeightsParams
from swaralign.rewards.scorer import Scorer, TakeScore
from tests.speech import demo_params

RATE_HZ = 1000


class Hears:
    """A recogniser that hears what it is told to, and keeps the lengths of the waves it was given."""

    window_s = 2.0

    def __init__(self, *transcripts: str) -> None:
        self.transcripts, self.lengths = list(transcripts), list[int]()

    def transcribe(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[str]:
        self.lengths += [len(wave) for wave in waves]
        return [self.transcripts.pop(0) for _ in waves]


def tone(samples: int = 500) -> np.ndarray:
    return np.sin(np.arange(samples)).astype(np.float32)


ASR_ALONE = WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0)


def reward_params(**changes: Any) -> RewardParams:
    """The demo's, but for the weights: the composite is 1 - min(1, error rate)."""
    return demo_params().reward.model_copy(update={"weights": ASR_ALONE, **changes})


def score_one(text: str, heard: str, **changes: Any) -> TakeScore:
    return Scorer(reward_params(**changes), Hears(heard)).score([tone()], [text], [False], RATE_HZ)[0]


def test_score_of_a_take() -> None:
    assert score_one("the red cat sat", "The bad cat sat.", metric="cer") == TakeScore(
        composite=1 - 2 / 15, cer=2 / 15, cer_capped=2 / 15, wer=0.25, wer_capped=0.25,
        cer_edits=2, cer_length=15, wer_edits=1, wer_length=4, mos=None,
        speaker_similarity=None, transcript="The bad cat sat.", flags=(),
    )


def test_reward_follows_the_metric() -> None:
    assert score_one("the red cat sat", "the bad cat sat", metric="wer").composite == 0.75
    assert score_one("the red cat sat", "the bad cat sat", metric="cer").composite == 1 - 2 / 15


def test_text_rule_is_applied_to_both_sides() -> None:
    assert score_one("It is two o'clock.", "it's 2:00", text_rule="english").composite == 1.0
    assert score_one("It is two o'clock.", "it's 2:00", text_rule="indic").composite < 1.0


def test_raw_rates_pass_1_and_capped_ones_do_not() -> None:
    score = score_one("cat", "big dogs bark at them")
    assert (score.wer, score.wer_capped) == (5.0, 1.0)
    assert score.cer > score.cer_capped == 1.0
    assert score.composite == 0.0


def test_take_that_says_nothing_is_scored() -> None:
    score = score_one("the cat", "")
    assert (score.composite, score.wer, score.transcript, score.flags, score.failed) == (0.0, 1.0, "", (), False)


def test_looping_transcript_is_flagged_and_scored() -> None:
    score = score_one("the cat", "the cat the cat the cat the cat")
    assert (score.flags, score.failed, score.wer_edits, score.composite) == (("repeats",), False, 6, 0.0)


def test_failed_takes_are_worth_nothing_and_never_heard() -> None:
    waves = [tone(), np.zeros(500, np.float32), tone(600), np.array([np.nan] * 500, np.float32), tone(0), tone(2001)]
    texts = ["one cat", "two cats", "red cat", "four cats", "five cats", "six cats"]
    asr = Hears("one cat")
    scores = Scorer(reward_params(), asr).score(waves, texts, [False, False, True, False, True, False], RATE_HZ)
    assert asr.lengths == [500]
    assert [score.flags for score in scores] == [
        (), ("silent",), ("truncated",), ("nonfinite",), ("empty", "truncated"), ("too_long",)
    ]
    assert [score.composite for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert all(score.failed and score.transcript is None for score in scores[1:])
    assert scores[2] == TakeScore(
        composite=0.0, cer=1.0, cer_capped=1.0, wer=1.0, wer_capped=1.0,
        cer_edits=7, cer_length=7, wer_edits=2, wer_length=2, mos=None,
        speaker_similarity=None, transcript=None, flags=("truncated",),
    )


def test_scores_come_back_in_order() -> None:
    waves = [tone(), tone(0), tone(), tone()]
    scores = Scorer(reward_params(), Hears("a", "b", "c")).score(waves, ["a", "x", "b", "c"], [False] * 4, RATE_HZ)
    assert [score.transcript for score in scores] == ["a", None, "b", "c"]


def test_unscorable_text_is_refused_before_anything_is_heard() -> None:
    asr = Hears("a", "b")
    with pytest.raises(ValueError, match=r"text ' \.\.\. ' is empty after the indic rule"):
        Scorer(reward_params(text_rule="indic"), asr).score([tone(), tone()], ["a", " ... "], [False] * 2, RATE_HZ)
    assert asr.lengths == []


def test_unequal_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Scorer(reward_params(), Hears("a")).score([tone()], ["a", "b"], [False], RATE_HZ)


def test_flags() -> None:
    assert set(FLAGS) - set(FAILURES) == {"repeats"}


def test_a_prompt_with_nothing_to_compare_is_named_before_any_take() -> None:
    scorer = Scorer(reward_params(), Hears())
    scorer.check([{"id": "p-1", "text": "Hello."}])
    with pytest.raises(ValueError, match=r"prompt p-2: the text 'Hmm\.' is empty after the english rule"):
        scorer.check([{"id": "p-1", "text": "Hello."}, {"id": "p-2", "text": "Hmm."}])
