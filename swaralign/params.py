"""The models of params.yaml: every key typed and bounded, unknown keys refused, cross-field rules checked first.

Imports neither torch nor a model, so that a typo costs a fraction of a second and not a loaded checkpoint.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

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


class LocalAsset(Section):
    """Files under a folder of the repository (or any path), each pinned by its hash."""

    source: Literal["local"]
    path: str
    id: str
    revision: str
    files: dict[str, Sha256] = Field(min_length=1)
    convert: Literal["ctranslate2"] | None = None  # a key of its own only where it is wanted


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


class HubAsset(Section):
    """Files of a repository on the hub at one commit. A hash of null means that the commit alone pins the file."""

    source: Literal["hub"]
    repo_type: Literal["model", "dataset"]
    id: HubId
    revision: Commit
    files: dict[str, Sha256 | None] = Field(min_length=1)
    convert: Literal["ctranslate2"] | None = None


class HubRowsAsset(Section):
    """Parquet files of a hub dataset at one commit, read in place: columns are fetched, files are not."""

    source: Literal["hub_rows"]
    id: HubId
    revision: Commit
    pattern: Annotated[str, Field(pattern=r"\.parquet$")]


FileAsset = LocalAsset | PackageAsset | HubAsset
Asset = Annotated[FileAsset, Field(discriminator="source")]
RowsAsset = Annotated[FileAsset | HubRowsAsset, Field(discriminator="source")]


class AssetsParams(Section):
    base: Asset
    adapter: Asset | None
    reference: Asset | None
    prompts: RowsAsset
    asr: Asset
    second_asr: Asset | None
    mos: Asset | None
    speaker_encoder: Asset | None


class RuntimeParams(Section):
    device: Literal["cpu", "cuda"]
    threads: Count


class SplitParams(Section):
    source: Literal["corpus"] = "corpus"
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


class TextSplitParams(Section):
    source: Literal["text"]
    config: str
    id_prefix: str
    train_files: list[str] = Field(min_length=1)
    held_out_files: list[str] = Field(min_length=1)
    expected_train: Count
    held_out: Count


class MergeParams(Section):
    orientation: Literal["mlx_lm", "peft"]
    scale: Positive | None
    expected_modules: Count


class DatasetSpeakerParams(Section):
    speaker_id: str | None


class SpeakerParams(Section):
    kind: Literal["x_vector"] = "x_vector"
    min_duration_s: Positive
    dataset: DatasetSpeakerParams | None = None  # a key of its own only where there is no assets.reference


class ProfileParams(Section):
    kind: Literal["profile"]
    min_duration_s: Positive
    transcript: str | None
    language: str
    compute_type: ComputeType
    beam_size: Count


class PredictorParams(Section):
    temperature: Annotated[float, Field(ge=0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction


class RolloutParams(Section):
    """What every voice family has. `speaker_kind`: what it speaks as; `penalises`: it knows a repetition penalty."""

    speaker_kind: ClassVar[str]
    penalises: ClassVar[bool]
    family: str
    batch_size: Count

    def check_window(self, key: str, window_s: float) -> None:
        """Raise ValueError if a take could be longer than what the ASR of section `key` hears at once."""
        raise NotImplementedError


class Qwen3TtsRolloutParams(RolloutParams):
    speaker_kind, penalises = "x_vector", False
    frames_per_second: ClassVar[float] = 12.5
    family: Literal["qwen3_tts"]
    language: str
    predictor: PredictorParams
    base_frames: Annotated[int, Field(ge=2)]
    frames_per_token: Positive
    max_frames: Annotated[int, Field(ge=2)]

    def check_window(self, key: str, window_s: float) -> None:
        longest_s = self.max_frames / self.frames_per_second
        if longest_s > window_s:
            raise ValueError(f"rollout.max_frames {self.max_frames} is {longest_s:.2f} s of speech, longer than "
                             f"{key}.window_s {window_s}: such takes could not be scored; "
                             f"{int(window_s * self.frames_per_second)} frames would do")


class OuteTtsRolloutParams(RolloutParams):
    speaker_kind, penalises = "profile", True
    codes_per_second: ClassVar[int] = 150  # of the 24 kHz codec: 75 frames of two codes
    family: Literal["outetts"]
    base_tokens: Count
    tokens_per_text_token: Positive
    max_tokens: Count

    def check_window(self, key: str, window_s: float) -> None:
        longest_s = self.max_tokens / self.codes_per_second
        if longest_s > window_s:
            raise ValueError(f"rollout.max_tokens {self.max_tokens} can hold {longest_s:.2f} s of speech, longer than "
                             f"{key}.window_s {window_s}: such takes could not be scored; "
                             f"{int(window_s * self.codes_per_second)} tokens would do")


class SamplingParams(Section):
    temperature: Positive
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0  # 1 is off; a key of its own only where it is wanted


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


class HttpParams(Section):
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+[^?#@\s]*$")]]
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
    keep_best: bool
    keep_every: Count | None

    @model_validator(mode="after")
    def _kept_ones_are_saved(self) -> Self:
        if self.keep_every and self.keep_every % self.save_every:
            raise ValueError(f"keep_every {self.keep_every} is not a multiple of save_every {self.save_every}: not all "
                             f"of them would be saved; {-(-self.keep_every // self.save_every) * self.save_every} "
                             "would do")
        return self


class ValidationParams(Section):
    every: Count
    prompts: Annotated[int, Field(ge=0)]
    seed: Seed
    sampling: SamplingParams


class CandidatesParams(Section):
    seed: Seed
    prompts: Count | None
    temperatures: Annotated[list[Positive], Field(min_length=1)]
    per_temperature: Count
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction
    save_every: Count

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} names one twice; raise per_temperature instead")
        if len(self.temperatures) * self.per_temperature < 2:
            raise ValueError("one take a prompt makes no preference; raise per_temperature or add a temperature")
        return self


class PairsParams(Section):
    strategy: Literal["max_margin", "top_k_vs_bottom_k"]
    k: Count
    min_margin: Annotated[float, Field(ge=0)]


class LabelsParams(Section):
    top: Annotated[float, Field(gt=0, lt=1)]
    bottom: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if self.top + self.bottom > 1:
            raise ValueError(f"top {self.top} and bottom {self.bottom} overlap: together they may be at most 1")
        return self


class PreferencesParams(Section):
    pairs: PairsParams
    labels: LabelsParams


class DpoParams(Section):
    seed: Seed
    beta: Positive
    pairs_per_update: Count
    micro_batch: Count
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        _divides(self.micro_batch, self.pairs_per_update, "pairs_per_update")
        return self


class KtoParams(Section):
    seed: Seed
    beta: Positive
    desirable_weight: Positive | None
    undesirable_weight: Positive | None
    takes_per_update: Count
    micro_batch: Annotated[int, Field(ge=2)]  # a take is compared with its neighbour in the batch
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        _divides(self.micro_batch, self.takes_per_update, "takes_per_update")
        return self


def _divides(micro_batch: int, batch: int, key: str) -> None:
    if batch % micro_batch:
        fits = [n for n in range(1, batch + 1) if batch % n == 0]
        raise ValueError(f"micro_batch {micro_batch} does not divide {key} {batch}; it could be one of {fits}")


class GrpoParams(Section):
    seed: Seed
    prompts_per_update: Count
    samples_per_prompt: Annotated[int, Field(ge=2)]
    micro_batch: Count
    num_processes: Count
    sharding: Literal["none", "fsdp"]
    trainable: Literal["lora", "full"]
    gradient_checkpointing: bool
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
    def _no_penalty(self) -> Self:
        if self.sampling.repetition_penalty > 1:
            raise ValueError(f"sampling.repetition_penalty is {self.sampling.repetition_penalty}, GRPO needs 1 (off): "
                             "it depends on the tokens before, so replayed log-probs would be another policy's")
        return self

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.lora.dropout:
            raise ValueError(f"lora.dropout is {self.lora.dropout}, GRPO needs 0: rollouts are sampled without "
                             "dropout, so replay under it would be another policy's")
        return self

    @model_validator(mode="after")
    def _shards(self) -> Self:
        if self.sharding == "fsdp" and (self.num_processes < 2 or self.trainable != "full"):
            raise ValueError(f"sharding fsdp is for trainable full over 2 or more num_processes, found trainable "
                             f"{self.trainable} over {self.num_processes}; set sharding to none")
        return self

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        takes, ranks = self.prompts_per_update * self.samples_per_prompt, self.num_processes
        made_of = f"(prompts_per_update {self.prompts_per_update} x samples_per_prompt {self.samples_per_prompt})"
        if takes % ranks:
            fits = [n for n in range(1, takes + 1) if takes % n == 0]
            raise ValueError(f"num_processes {ranks} does not divide the {takes} takes of an update {made_of}; "
                             f"it could be one of {fits}")
        if takes // ranks % self.micro_batch:
            fits = [n for n in range(1, takes + 1) if takes % (n * ranks) == 0]
            share = f" x num_processes {ranks}" if ranks > 1 else ""
            raise ValueError(f"micro_batch {self.micro_batch}{share} does not divide the {takes} takes of an update "
                             f"{made_of}; micro_batch could be one of {fits}")
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
    second_asr: AsrParams | None


class CompareParams(Section):
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    resamples: Annotated[int, Field(ge=100)]
    seed: Seed
    catastrophic_wer: Positive


class ReportParams(Section):
    prompts_with_audio: Count


class TrackingParams(Section):
    tracker: Literal["none", "tensorboard", "trackio", "wandb"]
    project: str


class FlowParams(Section):
    retries: Annotated[int, Field(ge=0)]
    retry_delay_s: Annotated[float, Field(ge=0)]
    grace_s: Annotated[float, Field(ge=0)]


class Params(Section):
    runtime: RuntimeParams
    assets: AssetsParams
    split: Annotated[SplitParams | TextSplitParams, Field(discriminator="source")]
    merge: MergeParams | None
    speaker: Annotated[SpeakerParams | ProfileParams, Field(discriminator="kind")]
    rollout: Annotated[Qwen3TtsRolloutParams | OuteTtsRolloutParams, Field(discriminator="family")]
    reward: RewardParams
    candidates: CandidatesParams
    preferences: PreferencesParams
    dpo: DpoParams
    kto: KtoParams
    grpo: GrpoParams
    evaluate: EvaluateParams
    compare: CompareParams
    report: ReportParams
    tracking: TrackingParams
    flow: FlowParams

    @model_validator(mode="after")
    def _prompts_suffice(self) -> Self:
        held_out = {f"{name}.validation.prompts": getattr(self, name).validation.prompts
                    for name in ("dpo", "kto", "grpo")}
        for key, wanted in {**held_out, "evaluate.prompts": self.evaluate.prompts}.items():
            if wanted > self.split.held_out:
                raise ValueError(f"{key} is {wanted}, but split.held_out keeps only {self.split.held_out} prompts")
        asked = self.candidates.prompts or 0
        if asked > self.split.expected_train:
            raise ValueError(f"candidates.prompts is {asked}, but split.expected_train is {self.split.expected_train}")
        return self

    @model_validator(mode="after")
    def _takes_fit(self) -> Self:
        for key, asr in (("reward.asr", self.reward.asr), ("evaluate.second_asr", self.evaluate.second_asr)):
            if asr:
                self.rollout.check_window(key, asr.window_s)
        for engine, found, asset in (("utmos", self.reward.mos.engine, "mos"),
                                     ("ecapa", self.reward.similarity.engine, "speaker_encoder")):
            if engine == found and getattr(self.assets, asset) is None:
                raise ValueError(f"the reward's engine {engine} needs the asset assets.{asset}, which is null")
        if (self.evaluate.second_asr is None) != (self.assets.second_asr is None):
            raise ValueError("evaluate.second_asr and assets.second_asr belong together: give both, or null for both")
        if self.grpo.sharding == "fsdp" and (self.runtime.device, self.rollout.family) != ("cuda", "qwen3_tts"):
            raise ValueError("grpo.sharding is fsdp, which is for a voice of family qwen3_tts on GPUs, found "
                             f"rollout.family {self.rollout.family} and runtime.device {self.runtime.device}")
        if self.grpo.prompts_per_update > self.split.expected_train:
            raise ValueError(f"grpo.prompts_per_update is {self.grpo.prompts_per_update}, "
                             f"but split.expected_train is {self.split.expected_train}")
        return self

    @model_validator(mode="after")
    def _speaker_has_a_clip(self) -> Self:
        dataset = self.speaker.dataset if isinstance(self.speaker, SpeakerParams) else None
        if (dataset is None) == (self.assets.reference is None):
            raise ValueError("the speaker comes from assets.reference, a clip, or from speaker.dataset, a row of the "
                             "corpus: give one of them, and null for the other")
        if dataset and self.split.source != "corpus":
            raise ValueError(f"speaker.dataset needs a corpus with audio, but split.source is {self.split.source!r}; "
                             "name a clip as assets.reference")
        if dataset and self.reward.similarity.engine != "none":
            raise ValueError(f"reward.similarity.engine is {self.reward.similarity.engine!r}, which compares with "
                             "assets.reference, but that is null; name a clip there, or set the engine to none")
        return self

    @model_validator(mode="after")
    def _voice_fits(self) -> Self:
        rollout = self.rollout
        if self.speaker.kind != rollout.speaker_kind:
            raise ValueError(f"speaker.kind is {self.speaker.kind!r}, but a voice of rollout.family {rollout.family!r} "
                             f"speaks as a {rollout.speaker_kind!r}")
        if (self.assets.adapter is None) != (self.merge is None):
            raise ValueError("assets.adapter and merge belong together: give both, or null for both")
        sampled = {"evaluate.sampling": self.evaluate.sampling} | {
            f"{name}.validation.sampling": getattr(self, name).validation.sampling for name in ("dpo", "kto", "grpo")
        }
        for key, sampling in sampled.items():
            if sampling.repetition_penalty > 1 and not rollout.penalises:
                raise ValueError(f"{key}.repetition_penalty is {sampling.repetition_penalty}, but the sampler of "
                                 f"rollout.family {rollout.family!r} knows none; leave the key out")
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
    where, models = _walk(fault["loc"])
    key = ".".join(where) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_suggest(where[-1], models)}"
    if fault["type"] == "missing":
        return f"{key}: missing"
    value = "" if isinstance(fault["input"], dict) else f", found {fault['input']!r}"
    return f"{key}: {fault['msg'].removeprefix('Value error, ')}{value}"


def _suggest(name: str, models: list[Any]) -> str:
    """Names the valid keys beside an unknown one, nearest first."""
    names = list(dict.fromkeys(field for model in models for field in model.model_fields))
    near = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"valid keys here: {', '.join(names)}"


def _walk(loc: tuple[str | int, ...]) -> tuple[list[str], list[Any]]:
    """A fault's place as keys of the file, and the models around its last key.

    Pydantic also names the member of a union by its tag (`source: local`), which is no key.
    """
    keys: list[str] = []
    models, around = [Params], [Params]
    for part in map(str, loc):
        tagged = [model for model in models if part in _tags(model)]
        if tagged:
            models = tagged
            continue
        keys.append(part)
        around = models
        models = [each for model in models if part in model.model_fields
                  for each in _models(model.model_fields[part].annotation)]
    return keys, around


def _tags(model: Any) -> set[str]:
    """What the single-valued fields of a model hold: the tags that tell it from the others of its union."""
    choices = [get_args(field.annotation) for field in model.model_fields.values()
               if get_origin(field.annotation) is Literal]
    return {each[0] for each in choices if len(each) == 1}


def _models(annotation: Any) -> list[Any]:
    """The models that a field may hold: its own, or those of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
