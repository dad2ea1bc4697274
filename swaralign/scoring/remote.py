"""`reward.kind: http`: takes judged by scorers behind the protocol, as a `TakeScorer` like the local one.

The guard is local: a failed take goes to nobody. The score is the scorer's, the error rates are made here of what it
heard, by the functions that the local scorer uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import numpy as np

from swaralign.params import RewardParams
from swaralign.rewards.scorer import UNHEARD, TakeScore, check_prompts, count_errors, failures, take_score
from swaralign.scoring.client import ScorerClient, connect
from swaralign.scoring.messages import AudioTake, ScoreReply


class RemoteScorer:
    """Scores takes through a client."""

    elsewhere = True

    def __init__(self, params: RewardParams, client: ScorerClient) -> None:
        self._params, self._client = params, client
        self._numbers = count()

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """As `TakeScorer.check`; then waits for the scorers, and raises ScorerError if none of them answers."""
        check_prompts(prompts, self._params.text_rule)
        self._client.wait_ready()

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        """As `TakeScorer.score`. Raises ScorerError if a take gets no score."""
        flags = failures(waves, truncated, sample_rate_hz, self._params, self._params.asr.window_s)
        takes = [AudioTake(wave, sample_rate_hz, text, {"id": self._id(wave)})
                 for wave, text, failed in zip(waves, texts, flags, strict=True) if not failed]
        replies = iter(self._client.score(takes) if takes else [])
        return [self._judge(text, None if failed else next(replies), failed)
                for text, failed in zip(texts, flags, strict=True)]

    def _judge(self, text: str, reply: ScoreReply | None, failed: tuple[str, ...]) -> TakeScore:
        wanted = self._params.http
        if reply is None:
            value, measured = wanted.failed_score, UNHEARD
        else:
            value, measured = reply.score, (reply.asr_text, reply.mos, reply.speaker_similarity)
        errors = count_errors(text, measured[0], self._params.text_rule) if wanted.transcripts else None
        return take_score(value, errors, measured, failed)

    def _id(self, wave: np.ndarray) -> str:
        """Unique in the run: a number, and what the take is, since a resumed run counts from 0 again."""
        return f"{next(self._numbers):06d}-{hashlib.blake2b(wave.tobytes(), digest_size=6).hexdigest()}"


def load_remote(params: RewardParams) -> RemoteScorer:
    """The scorer that `params.http` names. Raises ValueError if its token is not in the environment."""
    return RemoteScorer(params, connect(params.http))
