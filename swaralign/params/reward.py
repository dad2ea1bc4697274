"""What a take is worth: the recogniser, the other engines, their weights, and scorers elsewhere."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from swaralign.params.base import ComputeType, Count, Positive, Section


class AsrParams(Section):
    language: str
    compute_type: ComputeType
    beam_size: Count
    window_s: Annotated[float, Field(ge=8, le=30)]
    max_tokens: Annotated[int, Field(ge=8, le=224)]
    batch_size: Count


class GuardParams(Section):
    min_duration_s: Positive
    min_rms_dbfs: Annotated[float, Field(le=0)]


class WeightsParams(Section):
    error_rate: Annotated[float, Field(ge=0)]
    mos: Annotated[float, Field(ge=0)]
    speaker_similarity: Annotated[float, Field(ge=0)]


class MosParams(Section):
    engine: Literal["distillmos", "utmos", "none"]


class SimilarityParams(Section):
    engine: Literal["resemblyzer", "ecapa", "policy", "none"]


def check_url(url: str) -> str:
    """The URL itself; raises ValueError if it is no http(s) URL of a host, a port and a path."""
    try:
        parts = urlsplit(url)
        faulty = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError as error:
        raise ValueError(f"{url} is not a URL: {error}; as http://127.0.0.1:18080 or http://[::1]:18080") from error
    if faulty or re.search(r"[?#@\s]|[^ -~]", url):
        raise ValueError(f"{url} is not the URL of a scorer; as http://127.0.0.1:18080 or http://[::1]:18080")
    return url


class HttpParams(Section):
    urls: list[Annotated[str, AfterValidator(check_url)]]
    timeout_s: Positive
    retries: Annotated[int, Field(ge=0)]
    backoff_s: Annotated[float, Field(ge=0)]
    concurrency: Count
    token_env: str | None
    transcripts: bool
    failed_score: float

    @model_validator(mode="after")
    def _roots(self) -> Self:
        for url in self.urls:
            if url.endswith(("/", "/score")):
                raise ValueError(f"urls: {url} must be what comes before /score: "
                                 f"{url.rstrip('/').removesuffix('/score')}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls {self.urls} names one twice; raise concurrency instead")
        return self


class RewardParams(Section):
    kind: Literal["local", "http"]
    http: HttpParams
    weights: WeightsParams
    metric: Literal["cer", "wer"]
    text_rule: Literal["english", "indic"]
    asr: AsrParams
    mos: MosParams
    similarity: SimilarityParams
    guard: GuardParams

    @model_validator(mode="after")
    def _http_has_urls(self) -> Self:
        if self.kind == "http" and not self.http.urls:
            raise ValueError("kind is http, but http.urls is empty: name a scorer, as http://127.0.0.1:18080")
        return self

    @model_validator(mode="after")
    def _weights_have_engines(self) -> Self:
        weights = self.weights
        if not any(weights.model_dump().values()):
            raise ValueError("weights are all 0: nothing is left to reward; error_rate 1.0 would do")
        for key, engine, weight in (("mos", self.mos.engine, weights.mos),
                                    ("speaker_similarity", self.similarity.engine, weights.speaker_similarity)):
            if weight and engine == "none":
                raise ValueError(f"weights.{key} is {weight}, but its engine is none; choose an engine, or weigh it 0")
        return self
