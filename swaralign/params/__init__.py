"""The models of params.yaml: every key typed and bounded, unknown keys refused, cross-field rules checked first.

Imports neither torch nor a model, so that a typo costs a fraction of a second and not a loaded checkpoint.
"""

from swaralign.params.assets import (
    Asset,
    AssetsParams,
    FileAsset,
    HubAsset,
    HubRowsAsset,
    LocalAsset,
    PackageAsset,
    RowsAsset,
)
from swaralign.params.evaluation import CompareParams, EvaluateParams, ReportParams
from swaralign.params.load import load_params, parse_params, parse_text
from swaralign.params.preferences import CandidatesParams, LabelsParams, PairsParams, PreferencesParams
from swaralign.params.reward import (
    AsrParams,
    GuardParams,
    HttpParams,
    MosParams,
    RewardParams,
    SimilarityParams,
    WeightsParams,
    check_url,
)
from swaralign.params.rollout import (
    OuteTtsRolloutParams,
    PredictorParams,
    Qwen3TtsRolloutParams,
    RolloutParams,
    SamplingParams,
)
from swaralign.params.root import Params
from swaralign.params.runtime import FlowParams, RuntimeParams, TrackingParams
from swaralign.params.split import SplitParams, TextSplitParams
from swaralign.params.training import DpoParams, GrpoParams, KtoParams, LoraParams, ScheduleParams, ValidationParams
from swaralign.params.voice import DatasetSpeakerParams, MergeParams, ProfileParams, SpeakerParams

__all__ = [
    "AsrParams",
    "Asset",
    "AssetsParams",
    "CandidatesParams",
    "CompareParams",
    "DatasetSpeakerParams",
    "DpoParams",
    "EvaluateParams",
    "FileAsset",
    "FlowParams",
    "GrpoParams",
    "GuardParams",
    "HttpParams",
    "HubAsset",
    "HubRowsAsset",
    "KtoParams",
    "LabelsParams",
    "LocalAsset",
    "LoraParams",
    "MergeParams",
    "MosParams",
    "OuteTtsRolloutParams",
    "PackageAsset",
    "PairsParams",
    "Params",
    "PredictorParams",
    "PreferencesParams",
    "ProfileParams",
    "Qwen3TtsRolloutParams",
    "ReportParams",
    "RewardParams",
    "RolloutParams",
    "RowsAsset",
    "RuntimeParams",
    "SamplingParams",
    "ScheduleParams",
    "SimilarityParams",
    "SpeakerParams",
    "SplitParams",
    "TextSplitParams",
    "TrackingParams",
    "ValidationParams",
    "WeightsParams",
    "check_url",
    "load_params",
    "parse_params",
    "parse_text",
]
