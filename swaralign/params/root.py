"""The whole file: its sections, and the rules between them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from swaralign.params.assets import AssetsParams
from swaralign.params.base import Section
from swaralign.params.evaluation import CompareParams, EvaluateParams, ReportParams
from swaralign.params.preferences import CandidatesParams, PreferencesParams
from swaralign.params.reward import RewardParams
from swaralign.params.rollout import OuteTtsRolloutParams, Qwen3TtsRolloutParams
from swaralign.params.runtime import FlowParams, RuntimeParams, TrackingParams
from swaralign.params.split import SplitParams, TextSplitParams
from swaralign.params.training import DpoParams, GrpoParams, KtoParams
from swaralign.params.voice import MergeParams, ProfileParams, SpeakerParams


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
    def _pool_suffices(self) -> Self:
        pool, pairs = self.candidates, self.preferences.pairs
        prompts, takes = pool.prompts or self.split.expected_train, len(pool.temperatures) * pool.per_temperature
        k = 1 if pairs.strategy == "max_margin" else pairs.k
        if takes < 2 * k:
            raise ValueError(f"preferences.pairs.k {k} needs {2 * k} takes of a prompt, but candidates samples "
                             f"{takes}; k {takes // 2} would do, or a higher candidates.per_temperature")
        for key, wanted, most, what in (
            ("dpo.pairs_per_update", self.dpo.pairs_per_update, prompts * k * k, "pairs"),
            ("kto.takes_per_update", self.kto.takes_per_update, prompts * takes, "takes"),
        ):
            if wanted > most:
                raise ValueError(f"{key} is {wanted}, but {prompts} prompts with {takes} takes each make at most "
                                 f"{most} {what}")
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
        if self.grpo.sharding == "fsdp" and not (self.runtime.device == "cuda" and self.rollout.shards):
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
        engine, clip = self.reward.similarity.engine, self.assets.reference
        if dataset and engine != "none":
            raise ValueError(f"reward.similarity.engine is {engine!r}, which compares with "
                             "assets.reference, but that is null; name a clip there, or set the engine to none")
        if engine != "none" and clip and (profile := [name for name in clip.files if name.endswith(".json")]):
            raise ValueError(f"reward.similarity.engine is {engine!r}, which compares with a clip, but "
                             f"assets.reference is {profile[0]}, a ready profile; name a clip there, or set the engine "
                             "to none")
        if engine == "policy" and self.speaker.kind != "x_vector":
            raise ValueError("reward.similarity.engine is 'policy', but a voice of rollout.family "
                             f"{self.rollout.family!r} has no speaker encoder; resemblyzer would do")
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
