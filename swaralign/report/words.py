"""What the numbers of a comparison say, in words that the Markdown and the page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swaralign.comparison import METRICS, Metric, is_certain, measured, minus


@dataclass(frozen=True)
class Claim:
    """What is certain of one voice: a claim about the composite, its numbers, and what else differs."""

    head: str
    numbers: str
    rest: str


def number(value: float, metric: Metric, sign: str = "") -> str:
    """A value in its unit; with `sign` "+" a difference, of shares in percentage points."""
    if metric.kind == "share":
        return f"{100 * value:{sign}.1f}" + ("" if sign else " %")
    return f"{value:{sign}.3f}" if metric.kind == "points" else f"{value:{sign}.2f} s"


def interval(found: Mapping[str, float], metric: Metric) -> str:
    """The ends of a difference's interval, in brackets."""
    return f"[{number(found['low'], metric, '+')}, {number(found['high'], metric, '+')}]"


def p_value(p: float) -> str:
    """A p-value to three decimals, after the sign that it takes."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def level(result: Mapping[str, Any]) -> str:
    """The confidence of the intervals, as "95 %"."""
    return f"{100 * result['confidence']:g} %"


def claims(result: Mapping[str, Any], voices: Sequence[str], start: str) -> list[Claim]:
    """One claim for each voice but the start, the last voice first; of a difference only where it is certain."""
    return [_claim(result, voice, start) for voice in reversed(voices) if voice != start]


def best_voice(result: Mapping[str, Any], voices: Sequence[str], start: str) -> str:
    """The voice, other than the start, with the highest composite."""
    return max((voice for voice in voices if voice != start), key=lambda voice: result[voice]["composite"])


def reading(result: Mapping[str, Any], start: str, settings: Mapping[str, Any]) -> list[str]:
    """How the numbers are made: what a difference, an interval, a p-value, a rate and a failed take are."""
    return [
        f"A difference is a voice's value less {start}'s, on the same prompts with the same seeds; of rates it is in "
        f"percentage points. Its interval is the middle {level(result)} of the differences that come out when the "
        "prompts, not the takes, are drawn again with replacement, for both voices alike.",
        "p is how often a difference at least as large, either way, comes out when the two voices change places on "
        f"prompts at random. A difference is in bold where its interval excludes 0 and p is at most "
        f"{1 - result['confidence']:.3g}.",
        _composite(settings["reward"]),
        "A corpus rate is the edits of all takes over the words or characters of all texts; a mean is over takes. "
        f"A catastrophic failure is a take with a WER of {100 * result['catastrophic_wer']:g} % or more, or a failed "
        "one.",
        "A failed take (silent, cut off, too long, ...) counts with error rates of 100 %. It has no MOS and no speaker "
        "similarity: these are means over the takes that did not fail, so read them beside the failed takes.",
    ]


def caveats(result: Mapping[str, Any], voices: Sequence[str], start: str) -> list[str]:
    """What the numbers do not show."""
    metrics = measured(result, voices)
    if "second_wer_corpus" in metrics:
        check = "The second ASR took no part in any reward: its WER is the check."
    else:
        check = "No second ASR was set (`evaluate.second_asr`), so nothing here checks that."
    differences = sum(len(result[minus(voice, start)]) for voice in voices if voice != start)
    chance = round((1 - result["confidence"]) * differences)
    notes = [
        "The composite and what it is made of come from the models whose judgement training maximised: a voice can "
        f"have learnt what they like. {check}",
        "Transcripts depend on the ASR and its settings (`reward.asr`); rates under others, or of other prompts, "
        "are other numbers.",
        "Each method was trained once. The intervals speak for other prompts of this kind, not for other training "
        "seeds, texts or speakers.",
        f"{differences} differences stand here, and nothing is corrected for their number: about {max(1, chance)} of "
        "them would exclude 0 by chance if no voice differed.",
        "The fixed validation of the trainings samples the first of the same held-out prompts, with other seeds. No "
        "stage decides anything by it, but settings that were tuned by those curves were tuned on a part of this test.",
    ]
    if "mos" in metrics:
        notes.insert(1, "MOS is predicted by a model, not given by listeners, and such models hardly notice a clause "
                        "that is missing. Listen before you cite it.")
    return notes


def _claim(result: Mapping[str, Any], voice: str, start: str) -> Claim:
    found = result[minus(voice, start)]
    composite, metric = found["composite"], METRICS["composite"]
    certain = {name: each for name, each in found.items() if is_certain(each, result["confidence"])}
    if "composite" in certain:
        head = f"{voice} has a {'higher' if composite['low'] > 0 else 'lower'} composite than {start}"
    else:
        head = f"{voice} and {start} cannot be told apart by composite"
    numbers = (
        f"{number(result[voice]['composite'], metric)} against {number(result[start]['composite'], metric)}, "
        f"{number(composite['difference'], metric, '+')} {interval(composite, metric)}, "
        f"p {p_value(composite['p'])}"
    )
    others = {name: certain[name] for name, each in METRICS.items()
              if name in certain and name != "composite" and each.better != "neither"}
    better = [METRICS[name].label for name, each in others.items() if _gains(name, each)]
    worse = [METRICS[name].label for name, each in others.items() if not _gains(name, each)]
    rest = f"Other metrics better: {'; '.join(better) or 'none'}. Worse: {'; '.join(worse) or 'none'}."
    return Claim(head, numbers, rest)


def _gains(name: str, found: Mapping[str, float]) -> bool:
    return (found["difference"] > 0) == (METRICS[name].better == "higher")


def _composite(reward: Mapping[str, Any]) -> str:
    if reward["kind"] == "http":
        return f"The composite is the scorers' own score, {reward['http']['failed_score']:g} for a failed take."
    weights = reward["weights"]
    terms = {
        "error_rate": f"1 - {reward['metric'].upper()} (at least 0)",
        "mos": "MOS from [1, 5]",
        "speaker_similarity": "speaker similarity from [-1, 1]",
    }
    total = sum(weights.values())
    shares = [f"{term}, {100 * weights[name] / total:.0f} %" for name, term in terms.items() if weights[name]]
    return f"The composite is the weighted mean of {'; '.join(shares)}; each mapped to [0, 1], 0 for a failed take."
