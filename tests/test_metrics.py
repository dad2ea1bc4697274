"""The composite and the models behind it: MOS, speaker similarity, the one-call score."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distillmos import ConvTransformerSQAModel
from resemblyzer import VoiceEncoder, preprocess_wav

from swaralign.assets import resolve_file
from swaralign.audio import read_audio, resample
from swaralign.params import MosParams, SimilarityParams, WeightsParams
from swaralign.rewards import score
from swaralign.rewards.composite import composite, error_rate_term, mos_term, speaker_similarity_term
from swaralign.rewards.mos import DistillMos, load_mos
from swaralign.rewards.scorer import Scorer, load_scorer
from swaralign.rewards.similarity import Encoder, SpeakerSimilarity, load_encoder
from swaralign.speaker import extract
from tests.scoring import Scripted, http
from tests.speech import RATE_HZ, ROOT, clips, demo_params, transcriber

PUBLISHED = WeightsParams(error_rate=0.6, mos=0.4, speaker_similarity=0.3)
RECIPE = ROOT / "recipes" / "demo.yaml"
BASE = ROOT / "data" / "demo" / "base"


def resemblyzer() -> Encoder:
    return load_encoder(SimilarityParams(engine="resemblyzer"), None, None, "cpu")


@pytest.mark.parametrize(("rate", "term"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (3.0, 0.0)])
def test_error_rate_term(rate: float, term: float) -> None:
    assert error_rate_term(rate) == term


@pytest.mark.parametrize(("mos", "term"), [(1.0, 0.0), (3.0, 0.5), (5.0, 1.0), (0.9, 0.0), (5.2, 1.0)])
def test_mos_term(mos: float, term: float) -> None:
    assert mos_term(mos) == term


@pytest.mark.parametrize(("cosine", "term"), [(-1.0, 0.0), (0.0, 0.5), (1.0, 1.0)])
def test_speaker_similarity_term(cosine: float, term: float) -> None:
    assert speaker_similarity_term(cosine) == term


def test_composite_is_the_weighted_mean() -> None:
    assert composite(0.07, 4.12, 0.74, PUBLISHED) == pytest.approx((0.6 * 0.93 + 0.4 * 0.78 + 0.3 * 0.87) / 1.3)


def test_weights_are_normalised() -> None:
    tenfold = WeightsParams(error_rate=6.0, mos=4.0, speaker_similarity=3.0)
    assert composite(0.2, 3.3, 0.4, tenfold) == pytest.approx(composite(0.2, 3.3, 0.4, PUBLISHED))


@pytest.mark.parametrize("broken", range(3))
def test_what_is_not_finite_is_no_measurement(broken: int) -> None:
    parts = [0.1, 4.0, 0.5]
    parts[broken] = float("nan")
    with pytest.raises(ValueError, match="is nan: its engine made no number of this take"):
        composite(*parts, PUBLISHED)


def test_a_part_without_weight_may_be_missing_and_one_with_weight_may_not() -> None:
    alone = WeightsParams(error_rate=2.0, mos=0.0, speaker_similarity=0.0)
    assert composite(0.25, None, None, alone) == composite(0.25, 4.0, 0.9, alone) == 0.75
    with pytest.raises(ValueError, match=r"reward\.weights\.mos is 0\.4, but mos was not measured"):
        composite(0.25, None, 0.9, PUBLISHED)


@pytest.mark.parametrize("seconds", [0.3, 1.8, 7.2, 7.68, 9.0])
def test_mos_is_the_packages_own(seconds: float) -> None:
    """Silence that is not computed column by column makes no difference, whatever the length."""
    speech = np.tile(resample(clips(1)[0][1], RATE_HZ, 16_000), 8)[: int(16_000 * seconds)]
    whole = ConvTransformerSQAModel().eval()
    with torch.inference_mode():
        expected = whole(torch.from_numpy(speech)[None]).item()
    assert DistillMos("cpu").predict([speech], 16_000) == [pytest.approx(expected, abs=2e-5)]


def test_mos_prefers_speech_to_speech_in_noise() -> None:
    speech = clips(1)[0][1]
    noisy = speech + np.random.default_rng(0).normal(0, 0.05, len(speech)).astype(np.float32)
    clean, noise = DistillMos("cpu").predict([speech, noisy], RATE_HZ)
    assert clean > noise + 1 and 1 <= noise <= 5


def test_resemblyzer_similarity_is_the_packages_own() -> None:
    (_, one), (_, other) = clips(2)
    similarity = SpeakerSimilarity(resemblyzer(), one, RATE_HZ)
    encoder = VoiceEncoder("cpu", verbose=False)
    embeddings = [encoder.embed_utterance(preprocess_wav(resample(wave, RATE_HZ, 16_000))) for wave in (one, other)]
    expected = [1.0, float(embeddings[0] @ embeddings[1])]
    assert similarity.compare([one, other], RATE_HZ) == pytest.approx(expected, abs=1e-5)


def test_similarity_of_a_take_without_a_voice_is_a_number() -> None:
    hiss = np.random.default_rng(0).normal(0, 0.01, RATE_HZ).astype(np.float32)
    threads = torch.get_num_threads()
    cosine = SpeakerSimilarity(resemblyzer(), clips(1)[0][1], RATE_HZ).compare([hiss, hiss[:3000]], RATE_HZ)
    assert torch.get_num_threads() == threads  # the encoder takes one for itself only
    assert all(-1 <= each < 0.9 for each in cosine)


def test_the_policys_own_encoder() -> None:
    encoder = load_encoder(SimilarityParams(engine="policy"), None, BASE, "cpu")
    wave = clips(1)[0][1]
    assert encoder(wave, RATE_HZ).tolist() == pytest.approx(extract(wave, BASE), abs=1e-6)
    assert SpeakerSimilarity(encoder, wave, RATE_HZ).compare([0.5 * wave], RATE_HZ)[0] > 0.9


@pytest.mark.parametrize(("module", "engine", "told"), [
    ("distillmos", "distillmos", "pip install distillmos"),
    ("utmos_pytorch", "utmos", "pip install 'swaralign[utmos]'"),
    ("resemblyzer", "resemblyzer", "pip install --no-deps"),
    ("speechbrain", "ecapa", "pip install 'swaralign[ecapa]'"),
])
def test_an_engine_that_is_not_installed_says_how_to_get_it(
    module: str, engine: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"engine is {engine}, which is not installed") as error:
        if engine in ("distillmos", "utmos"):
            load_mos(MosParams(engine=engine), ROOT, "cpu")
        else:
            load_encoder(SimilarityParams(engine=engine), ROOT, None, "cpu")
    assert told in str(error.value)


def test_engines_that_need_more_say_so() -> None:
    with pytest.raises(ValueError, match=r"engine is utmos, which needs the asset `mos`"):
        load_mos(MosParams(engine="utmos"), None, "cpu")
    with pytest.raises(ValueError, match=r"engine is ecapa, which needs the asset `speaker_encoder`"):
        load_encoder(SimilarityParams(engine="ecapa"), None, None, "cpu")
    with pytest.raises(ValueError, match=r"engine is policy, which needs the voice's checkpoint"):
        load_encoder(SimilarityParams(engine="policy"), None, None, "cpu")
    with pytest.raises(ValueError, match=r"nosuch is no checkpoint; `dvc repro merge` makes"):
        load_encoder(SimilarityParams(engine="policy"), None, Path("nosuch"), "cpu")


def test_the_loaded_scorer_measures_everything_and_a_failed_take_reaches_no_model() -> None:
    scorer = load_scorer(demo_params(), every_metric=True, root=ROOT)
    (text, wave), silence = clips(1)[0], np.zeros(RATE_HZ, np.float32)
    good, bad = scorer.score([wave, silence], [text, text], [False, False], RATE_HZ)
    assert good.mos is not None and good.speaker_similarity is not None
    assert good.composite == composite(good.cer, good.mos, good.speaker_similarity, demo_params().reward.weights)
    assert (bad.composite, bad.mos, bad.speaker_similarity, bad.flags) == (0.0, None, None, ("silent",))


def test_what_weighs_nothing_is_measured_only_where_every_metric_is_wanted() -> None:
    alone = WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0)
    params = demo_params().model_copy(update={"reward": demo_params().reward.model_copy(update={"weights": alone})})
    (text, wave) = clips(1)[0]
    for every, measured in ((False, False), (True, True)):
        one = load_scorer(params, every_metric=every, root=ROOT).score([wave], [text], [False], RATE_HZ)[0]
        assert (one.mos is not None, one.speaker_similarity is not None) == (measured, measured)
        assert one.composite == 1 - one.cer_capped


def test_one_call_scores_as_the_pipeline_does() -> None:
    text, wave = clips(1)[0]
    reference, rate = read_audio(resolve_file("reference", demo_params().assets, ROOT))
    found = score(wave, text, RATE_HZ, reference_audio=reference, reference_sr=rate, params=RECIPE, root=ROOT)
    expected = load_scorer(demo_params(), root=ROOT).score([wave], [text], [False], RATE_HZ)[0]
    assert found == vars(expected)


def test_one_call_without_a_reference_leaves_the_similarity_out() -> None:
    text, wave = clips(1)[0]
    found = score(wave, text, RATE_HZ, params=RECIPE, root=ROOT)
    assert found["speaker_similarity"] is None
    two = WeightsParams(error_rate=0.6, mos=0.4, speaker_similarity=0.0)
    assert found["composite"] == composite(found["cer"], found["mos"], None, two)


def test_one_call_reads_the_params_as_they_are_now(tmp_path: Path) -> None:
    text, wave = clips(1)[0]
    path = tmp_path / "params.yaml"
    found = []
    for engine in ("distillmos", "none"):
        path.write_text(RECIPE.read_text().replace("engine: distillmos", f"engine: {engine}")
                        .replace("mos: 0.4", "mos: 0.0"))
        found.append(score(wave, text, RATE_HZ, params=path, root=ROOT)["mos"])
    assert found[0] is not None and found[1] is None


def test_one_call_asks_a_scorer_of_kind_http(tmp_path: Path) -> None:
    text, wave = clips(1)[0]
    path = tmp_path / "params.yaml"
    with Scripted(http(200, b'{"score": 0.25, "asr_text": "red cars"}')) as server:
        text_of = RECIPE.read_text().replace("kind: local", "kind: http")
        path.write_text(text_of.replace("http://127.0.0.1:18080", server.url))
        found = score(wave, text, RATE_HZ, params=path, root=ROOT)
        with pytest.raises(ValueError, match="has a reference of its own; leave reference_audio out"):
            score(wave, text, RATE_HZ, params=path, root=ROOT, reference_audio=wave)
    assert (found["composite"], found["transcript"], len(server.requests)) == (0.25, "red cars", 1)


@pytest.mark.parametrize(("changes", "told"), [
    ({"sample_rate": 0}, "sample_rate is 0, not a rate in Hz"),
    ({"sample_rate": float("nan")}, "sample_rate is nan, not a rate in Hz"),
    ({"sample_rate": "24000"}, "sample_rate is '24000', not a rate in Hz"),
    ({"reference_sr": 0}, "reference_sr is 0, not a rate in Hz"),
    ({"reference_audio": np.zeros(RATE_HZ)}, "the reference clip is silent"),
    ({"reference_audio": np.zeros(0)}, "the reference clip is silent"),
    ({"reference_audio": np.full(RATE_HZ, np.nan)}, "the reference clip holds samples that are not finite"),
    ({"reference_audio": np.zeros((2, 9))}, r"reference_audio must be one channel .* found \(2, 9\)"),
    ({"reference_audio": np.full(RATE_HZ, 12000.0)}, "reference_audio has a peak of 12000, not samples in"),
    ({"audio": np.full(RATE_HZ, 12000.0)}, "audio has a peak of 12000, not samples in .* divide it by its full scale"),
])
def test_one_call_refuses_what_would_be_scored_wrongly(changes: dict[str, Any], told: str) -> None:
    text, wave = clips(1)[0]
    given = {"audio": wave, "sample_rate": RATE_HZ, "reference_audio": wave, "reference_sr": RATE_HZ} | changes
    with pytest.raises(ValueError, match=told):
        score(target_text=text, params=RECIPE, root=ROOT, **given)


def test_one_call_refuses_integers() -> None:
    with pytest.raises(ValueError, match="audio holds int16, not samples in"):
        score(np.zeros(100, np.int16), "hello", RATE_HZ, params=RECIPE, root=ROOT)


def test_one_call_refuses_two_channels() -> None:
    with pytest.raises(ValueError, match="one channel"):
        score(np.zeros((2, 100), np.float32), "hello", RATE_HZ, params=RECIPE, root=ROOT)


def test_scores_do_not_depend_on_neighbours() -> None:
    scorer = Scorer(demo_params().reward, transcriber(), DistillMos("cpu"),
                    SpeakerSimilarity(resemblyzer(), clips(1)[0][1], RATE_HZ))
    texts, waves = zip(*clips(3), strict=True)
    together = scorer.score(waves, texts, [False] * 3, RATE_HZ)
    assert together == [scorer.score([wave], [text], [False], RATE_HZ)[0] for text, wave in clips(3)]
