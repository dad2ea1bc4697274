"""What every section is made of: strict, immutable, no unknown key; and the bounded numbers and names in it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]  # a branch or a tag moves
HubId = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
ComputeType = Literal["int8", "int8_float32", "float32", "float16", "int8_float16", "bfloat16"]  # of CTranslate2
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # as NumPy takes it


class Section(BaseModel):
    """A section of params.yaml: strict types, no unknown key, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
