"""The audio scorer protocol, version "1": one take a request, one finite score a reply, both JSON objects."""

from __future__ import annotations

import base64
import binascii
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

MAX_BODY_BYTES = 8 * 2**20
MAX_SCALARS = 1000  # of one take's metadata, or of a reply
Scalar = str | bool | int | float | None
_F32 = np.dtype("<f4")
_PLAINLY = {"model_type": "must be an object", "dict_type": "must be an object",
            "string_pattern_mismatch": "must not be empty", "missing": "is missing"}  # pydantic's faults, in our words


@dataclass(frozen=True)
class AudioTake:
    """What is to be scored: a (samples,) float32 wave, the text that it should say, and scalars about it.

    `metadata["id"]`, if there is one, comes back with the score as `sample_id`.
    """

    wave: np.ndarray
    sample_rate_hz: int
    prompt: str
    metadata: Mapping[str, Scalar]


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        value.encode()  # a lone surrogate is no text that can be sent: UnicodeEncodeError, a ValueError
    elif value is not None and not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
        raise ValueError(f"must be a string, a finite number, a boolean or null, found {_short(value)}")
    return value


def _scalars(values: Any) -> Any:
    """Raises ValueError at the first fault: a list of all of them could take a hundred times the body's memory."""
    if isinstance(values, dict):
        if len(values) > MAX_SCALARS:
            raise ValueError(f"holds {len(values)} keys, more than {MAX_SCALARS}")
        for key, value in values.items():
            try:
                _scalar(value)
            except ValueError as error:
                raise ValueError(f"{key!s:.200}: {error}") from None
    return values


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class ScoreRequest(_Message):
    """The body of `POST /score`; `waveform_f32_base64` holds little-endian float32. Unknown keys are ignored."""

    protocol_version: Literal["1"]
    waveform_f32_base64: str
    num_samples: Annotated[int, Field(ge=1)]
    sample_rate: Annotated[int, Field(ge=1)]
    prompt: Annotated[str, Field(pattern=r"\S")]
    metadata: Annotated[dict[str, Any], BeforeValidator(_scalars)]


class ScoreReply(_Message):
    """The body of a reply. Any further key is a diagnostic, a scalar; those declared here are what we read.

    `mos` in [1, 5]; `speaker_similarity` in [-1, 1]; `asr_text`: what a recogniser heard; `sample_id`: the take's.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")
    __pydantic_extra__: dict[str, Any] = Field(init=False)

    score: float
    asr_text: Annotated[str | None, BeforeValidator(_scalar)] = None
    mos: float | None = None
    speaker_similarity: float | None = None
    sample_id: Annotated[Any, BeforeValidator(_scalar)] = None

    @model_validator(mode="before")
    @classmethod
    def _scalars_and_no_error(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if "error" in data:
                raise ValueError(f"carries error: {_short(data['error'])}")
            _scalars({key: value for key, value in data.items() if key not in cls.model_fields})
        return data

    def told(self) -> dict[str, Scalar]:
        """The reply as it is sent: what was not measured is left out."""
        return self.model_dump(exclude_none=True)

    def named(self, take: AudioTake) -> Self:
        """The same reply with the id of its take."""
        return self.model_copy(update={"sample_id": take.metadata.get("id")})


def read_token(variable: str, named_by: str) -> str:
    """The bearer token in an environment variable, the space around it cut off; `named_by`: the setting, for messages.

    Raises ValueError if there is none, or if a header cannot hold it; no message tells the token.
    """
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"{named_by} is {variable}, but that environment variable is not set")
    if not token.isprintable() or " " in token:
        raise ValueError(f"{named_by} is {variable}, whose value has spaces or control characters inside; set it to "
                         "the token alone")
    return token


def encode_take(take: AudioTake) -> bytes:
    """A take as the body of `POST /score`."""
    samples = np.ascontiguousarray(take.wave, _F32)
    return json.dumps({
        "protocol_version": "1",
        "waveform_f32_base64": base64.b64encode(samples.tobytes()).decode(),
        "num_samples": len(samples),
        "sample_rate": take.sample_rate_hz,
        "prompt": take.prompt,
        "metadata": dict(take.metadata),
    }).encode()


def parse_json(body: bytes | bytearray) -> Any:
    """A JSON body; raises ValueError for anything else, NaN and infinity among it."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def parse_take(data: Any) -> AudioTake:
    """A take from a parsed request; raises ValueError with one reason a fault."""
    try:
        request = ScoreRequest.model_validate(data)
    except ValidationError as error:
        raise ValueError(_reasons(error)) from None
    wave = _wave(request.waveform_f32_base64)
    if len(wave) != request.num_samples:
        raise ValueError(f"num_samples is {request.num_samples}, but the waveform holds {len(wave)} samples")
    if not np.isfinite(wave).all():
        raise ValueError("waveform_f32_base64 holds NaN or infinity")
    return AudioTake(wave, request.sample_rate, request.prompt, request.metadata)


def parse_reply(data: Any) -> ScoreReply:
    """A reply from its parsed body; raises ValueError with one reason a fault."""
    try:
        return ScoreReply.model_validate(data)
    except ValidationError as error:
        raise ValueError(_reasons(error)) from None


def _wave(text: str) -> np.ndarray:
    try:
        samples = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"waveform_f32_base64 is not base64: {error}") from None
    if len(samples) % _F32.itemsize:
        raise ValueError(f"waveform_f32_base64 holds {len(samples)} bytes, which is no whole number of float32 samples")
    return np.frombuffer(samples, _F32).astype(np.float32, copy=False)


def _reasons(error: ValidationError) -> str:
    reasons = []
    for fault in error.errors(include_url=False):
        key = ".".join(map(str, fault["loc"]))
        reason = fault["msg"].removeprefix("Value error, ")
        reason = _PLAINLY.get(fault["type"], reason)
        found = "" if fault["type"] in ("missing", "value_error") else f", found {_short(fault['input'])}"
        reasons.append(f"{key}: {reason}{found}" if key else f"{reason}{found}")
    return "; ".join(reasons[:8])


def _short(value: Any) -> str:
    """A value as a message tells it: never the megabytes of a waveform."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"  # Python writes out no more than some thousand digits
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
