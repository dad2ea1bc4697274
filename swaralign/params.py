"""The models of params.yaml: every key typed and bounded, unknown keys refused, cross-field rules checked first.

Imports neither torch nor a model, so that a typo costs a fraction of a second and not a loaded checkpoint.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fraction = Annotated[float, Field(gt=0, le=1)]
FRAMES_PER_SECOND = 12.5  # of the Qwen3-TTS 12 Hz codec
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # as NumPy takes it


class Section(BaseModel):
    """A section of params.yaml: strict types, no unknown key, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LocalAsset(Section):
    """Files under a folder of the repository (or any path), each pinned by its hash."""

    source: Literal["local"]
    path: str
    id: str
    revision: str
    files: dict[str, Sha256] = Field(min_length=1)


class PackageAsset(Section):
    """Files that installed Python packages ship; a file may be split over several packages' parts."""

    source: Literal["package"]
    id: str
    revision: str
    files: dict[str, Sha256] = Field(min_length=1)
    parts: dict[str, list[str]]

    @model_validator(mode="after")
    def _every_file_has_parts(self) -> Self:
        missing = sorted(set(self.files) ^ set(self.parts))
        if missing:
            raise ValueError(f"files and parts must name the same files; only one of them names {missing}")
        return self


Asset = Annotated[LocalAsset | PackageAsset, Field(discriminator="source")]


class AssetsParams(Section):
    base: Asset
    adapter: Asset
    reference: Asset
    prompts: Asset
    asr: Asset


class RuntimeParams(Section):
    device: Literal["cpu", "cuda"]
    threads: Count


class SplitParams(Section):
    config: str
    id_prefix: str
    scenario: Literal["Read", "Extempore"]
    window_rows: Count
    min_duration_s: Positive
    max_duration_s: Positive
    min_snr_db: float
    expected_train: Count
    held_out: Count

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_duration_s > self.max_duration_s:
            raise ValueError(f"min_duration_s {self.min_duration_s} is above max_duration_s {self.max_duration_s}")
        if self.expected_train > self.window_rows:
            raise ValueError(f"expected_train {self.expected_train} is above window_rows {self.window_rows}")
        return self


class MergeParams(Section):
    orientation: Literal["mlx_lm", "peft"]
    scale: Positive | None
    expected_modules: Count


class SpeakerParams(Section):
    min_duration_s: Positive


class PredictorParams(Section):
    temperature: Annotated[float, Field(ge=0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction


class RolloutParams(Section):
    family: Literal["qwen3_tts"]
    language: str
    predictor: PredictorParams
    base_frames: Annotated[int, Field(ge=2)]
    frames_per_token: Positive
    max_frames: Annotated[int, Field(ge=2)]
    batch_size: Count


class SamplingParams(Section):
    temperature: Positive
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction


class AsrParams(Section):
    language: str
    compute_type: Literal["int8", "int8_float32", "float32", "float16", "int8_float16", "bfloat16"]
    beam_size: Count
    window_s: Annotated[float, Field(ge=8, le=30)]
    max_tokens: Annotated[int, Field(ge=8, le=224)]
    batch_size: Count


class GuardParams(Section):
    min_duration_s: Positive
    min_rms_dbfs: Annotated[float, Field(le=0)]


class RewardParams(Section):
    metric: Literal["cer", "wer"]
    text_rule: Literal["english", "indic"]
    asr: AsrParams
    guard: GuardParams


class LoraParams(Section):
    r: Count
    alpha: Count
    dropout: Annotated[float, Field(ge=0, lt=1)]


class ScheduleParams(Section):
    updates: Count
    learning_rate: Positive
    warmup_updates: Annotated[int, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: Positive
    save_every: Count
    keep_checkpoints: Annotated[int, Field(ge=2)]  # the one before must stay while a new one is written


class ValidationParams(Section):
    every: Count
    prompts: Count
    seed: Seed


class GrpoParams(Section):
    seed: Seed
    prompts_per_update: Count
    samples_per_prompt: Annotated[int, Field(ge=2)]
    micro_batch: Count
    iterations: Count
    sampling: SamplingParams
    beta: Annotated[float, Field(ge=0)]
    epsilon: Positive
    loss_aggregation: Literal["token", "sequence"]
    scale_by_std: bool
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.lora.dropout:
            raise ValueError(f"lora.dropout is {self.lora.dropout}, GRPO needs 0: rollouts are sampled without "
                             "dropout, so replay under it would be another policy's")
        return self

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        takes = self.prompts_per_update * self.samples_per_prompt
        if takes % self.micro_batch:
            fits = [n for n in range(1, takes + 1) if takes % n == 0]
            raise ValueError(
                f"micro_batch {self.micro_batch} does not divide the {takes} takes of an update "
                f"(prompts_per_update {self.prompts_per_update} x samples_per_prompt {self.samples_per_prompt}); "
                f"micro_batch could be one of {fits}"
            )
        for key, value in (("updates", self.schedule.updates), ("save_every", self.schedule.save_every)):
            if value % self.iterations:
                raise ValueError(
                    f"schedule.{key} {value} is not a multiple of iterations {self.iterations}: a rollout batch would "
                    f"be cut; {value // self.iterations * self.iterations or self.iterations} would do"
                )
        return self


class EvaluateParams(Section):
    seed: Seed
    samples_per_prompt: Count
    prompts: Count
    sampling: SamplingParams


class CompareParams(Section):
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    resamples: Annotated[int, Field(ge=100)]
    seed: Seed


class Params(Section):
    runtime: RuntimeParams
    assets: AssetsParams
    split: SplitParams
    merge: MergeParams
    speaker: SpeakerParams
    rollout: RolloutParams
    reward: RewardParams
    grpo: GrpoParams
    evaluate: EvaluateParams
    compare: CompareParams

    @model_validator(mode="after")
    def _prompts_suffice(self) -> Self:
        for key, wanted in (("grpo.validation.prompts", self.grpo.validation.prompts),
                            ("evaluate.prompts", self.evaluate.prompts)):
            if wanted > self.split.held_out:
                raise ValueError(f"{key} is {wanted}, but split.held_out keeps only {self.split.held_out} prompts")
        longest_s = self.rollout.max_frames / FRAMES_PER_SECOND
        if longest_s > self.reward.asr.window_s:
            raise ValueError(f"rollout.max_frames {self.rollout.max_frames} is {longest_s:.2f} s of speech, longer "
                             f"than reward.asr.window_s {self.reward.asr.window_s}: such takes could not be scored; "
                             f"{int(self.reward.asr.window_s * FRAMES_PER_SECOND)} frames would do")
        if self.grpo.prompts_per_update > self.split.expected_train:
            raise ValueError(f"grpo.prompts_per_update is {self.grpo.prompts_per_update}, "
                             f"but split.expected_train is {self.split.expected_train}")
        return self


def load_params(path: str | Path = "params.yaml") -> Params:
    """Read and validate a params file.

    Raises:
        ValueError: the file is missing, is not YAML, or a key is unknown, missing, mistyped or out of range;
            the message has one line a fault, each naming its key, the value and what would do.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; `cp recipes/demo.yaml params.yaml` makes one")
    try:
        data = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    return parse_params(data, str(path))


def parse_params(data: Any, name: str = "params") -> Params:
    """Validate an already parsed mapping; `name` stands in the messages. Raises ValueError as `load_params`."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} must be a mapping of sections, found {type(data).__name__}")
    try:
        return Params.model_validate(data)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ValueError(f"{name} is not valid:\n  " + "\n  ".join(lines)) from None


def _explain(fault: Any) -> str:
    where = [str(part) for part in fault["loc"] if part not in ("local", "package")]
    key = ".".join(where) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_suggest(where)}"
    if fault["type"] == "missing":
        return f"{key}: missing"
    value = "" if isinstance(fault["input"], dict) else f", found {fault['input']!r}"
    return f"{key}: {fault['msg'].removeprefix('Value error, ')}{value}"


def _suggest(where: list[str]) -> str:
    """Names the valid keys beside an unknown one, nearest first."""
    names = _keys_at(where[:-1])
    near = difflib.get_close_matches(where[-1], names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"valid keys here: {', '.join(names)}"


def _keys_at(where: list[str]) -> list[str]:
    model: Any = Params
    for part in where:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    if hasattr(model, "model_fields"):
        return list(model.model_fields)
    return sorted(set(LocalAsset.model_fields) | set(PackageAsset.model_fields))
