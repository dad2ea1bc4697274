"""The page: its numbers are the comparison's, it is one well-formed file, and no text becomes markup."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evaluations import PARAMS, evaluation, random_voices, take, tone, write

from swaralign.comparison import METRICS, Evaluation, compare, minus, read_evaluations
from swaralign.report.charts import interval_chart, line_chart, ticks
from swaralign.report.page import Inputs, read_clips, read_curves, render_page, widest
from swaralign.report.words import number

ALL = ("base", "sft", "dpo", "kto", "grpo")
VOID = {"meta", "link", "input", "br", "img"}
REFERENCES = ("aria-labelledby", "aria-describedby", "for")


class Page(HTMLParser):
    """What a page is made of; raises if a tag is closed that is not the open one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.code: list[str] = []  # what stands in <style> and <script>
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.code if self.open and self.open[-1] in ("style", "script") else self.texts).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def inputs(voices: dict[str, Evaluation], ids: list[str], manifests: dict[str, Any] | None = None) -> Inputs:
    curves = {"loss": [(1.0, 0.7), (2.0, 0.4)], "margin": [(1.0, 0.0), (2.0, 0.3)]}
    return Inputs(
        evaluations=voices, start="sft", result=json.loads(json.dumps(compare(voices, "sft", PARAMS), sort_keys=True)),
        clips={prompt_id: {voice: tone(voice) for voice in voices} for prompt_id in ids},
        curves={"dpo": curves, "grpo": curves}, validations={"dpo": {"composite": [(0.0, 0.6), (20.0, 0.7)]}},
        manifests=manifests or {}, params={"compare": PARAMS.model_dump()},
    )


@pytest.fixture(scope="module")
def voices() -> dict[str, Evaluation]:
    return random_voices(prompts=12, draws=2, voices=ALL)


def test_the_table_holds_every_number_of_the_comparison(voices: dict[str, Evaluation]) -> None:
    given = inputs(voices, widest(voices, 2))
    texts = Page(render_page(given)).texts
    for name, metric in METRICS.items():
        for voice in voices:
            assert number(given.result[voice][name], metric) in texts
            if voice != "sft":
                assert number(given.result[minus(voice, "sft")][name]["difference"], metric, "+") in texts
    assert "grpo has a higher composite than sft" in texts


def test_the_page_is_one_well_formed_file_whose_references_exist(voices: dict[str, Evaluation]) -> None:
    page = Page(render_page(inputs(voices, widest(voices, 3))))
    ids = [str(attributes["id"]) for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = [each for _, attributes in page.tags for name in REFERENCES
              for each in (attributes.get(name) or "").split()]
    wanted += [str(attributes["href"]).removeprefix("#") for attributes in page.all("a")]
    assert wanted and set(wanted) <= set(ids)
    assert len(page.code) == 2
    values = [value for _, attributes in page.tags for value in attributes.values() if value]
    assert not [each for each in (*values, *page.code) if re.search(r"https?:|@import|url\(", each)]
    assert all(str(each["src"]).startswith("data:audio/flac;base64,") for each in page.all("audio"))
    assert not page.all("link") and {tag for tag, attributes in page.tags if "src" in attributes} == {"audio"}
    policy = page.all("meta")[3]["content"] or ""
    assert policy.startswith("default-src 'none'; media-src data:;")


def test_the_page_can_be_read_without_seeing_it(voices: dict[str, Evaluation]) -> None:
    page = Page(render_page(inputs(voices, widest(voices, 2))))
    assert page.all("html")[0]["lang"] == "en"
    assert all(each.get("scope") in ("row", "col") for each in page.all("th"))
    assert all(each.get("aria-label") for each in page.all("audio") + page.all("svg"))
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    assert len(page.all("caption")) == len(page.all("table"))
    assert {str(each["for"]) for each in page.all("label")} == {str(each["id"]) for each in page.all("input")}


def test_hostile_text_stays_text() -> None:
    hostile = "</p></script><script>alert(1)</script> \" onload='x' {{ 7 * 7 }} </pre><img src=x onerror=y> &lt;"
    rows = [take(0, 0, hostile, hostile), take(1, 0, "red", None)]
    rows = [row | {"id": f"{row['id']}\"><b onclick=z>"} for row in rows]
    pair = {voice: evaluation(rows) for voice in ("sft", "grpo")}
    page = Page(render_page(inputs(pair, [rows[0]["id"]], {f"data/{hostile}": {hostile: hostile}})))
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.texts.count(hostile) == 2 * (1 + 2)  # to hear and among all prompts: the text, and two transcripts
    assert f"data/{hostile}" in page.texts
    assert rows[0]["id"] in page.texts and "(silent)" in page.texts
    assert page.all("audio")[0]["aria-label"] == f"sft says: {hostile}"


def test_equal_inputs_give_equal_bytes_without_a_machine_path(voices: dict[str, Evaluation], root: Path) -> None:
    one, other = (render_page(inputs(voices, widest(voices, 2))) for _ in range(2))
    assert one == other
    assert str(root) not in one and sys.prefix not in one


def test_prompts_that_differ_most_come_first_and_the_base_does_not_count() -> None:
    texts = ["a b c d"] * 3
    said = {"base": [None, None, "a b c d"], "sft": ["a b c d", "a b x x", "a b c d"],
            "dpo": ["a b c d", "a b c d", "a b c x"]}
    voices = {name: evaluation([take(p, 0, texts[p], heard[p]) for p in range(3)]) for name, heard in said.items()}
    assert widest(voices, 3) == ["p-1", "p-2", "p-0"]
    assert widest({name: voices[name] for name in ("base", "sft")}, 2) == ["p-0", "p-1"]


def test_clips_are_the_bytes_of_draw_0(tmp_path: Path) -> None:
    voices = random_voices(prompts=2, draws=2, voices=("sft", "grpo"))
    silent = [row | {"audio": None} if row["draw"] == 0 and row["id"] == "p-1" else row
              for row in voices["grpo"].takes.to_pylist()]
    write(tmp_path, {"sft": voices["sft"], "grpo": evaluation(silent)})
    clips = read_clips(tmp_path, ["sft", "grpo"], ["p-1", "p-0"])
    assert clips == {"p-1": {"sft": tone("sft")}, "p-0": {"sft": tone("sft"), "grpo": tone("grpo")}}
    assert list(clips) == ["p-1", "p-0"]
    page = Page(render_page(replace(inputs(voices, []), clips=clips)))
    played = [base64.b64decode(str(each["src"]).partition(",")[2]) for each in page.all("audio")]
    assert played == [tone("sft"), tone("sft"), tone("grpo")] and "no audio" in page.texts


def test_curves_leave_out_what_is_empty(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text("step,loss,mos,margin\n1,0.5,,\n2,0.25,,0.1\n3,nan,,inf\n")
    assert read_curves(tmp_path / "curves.csv") == {"loss": [(1, 0.5), (2, 0.25)], "margin": [(2, 0.1)]}
    (tmp_path / "none.csv").write_text("step,loss\n")
    assert read_curves(tmp_path / "none.csv") == {}


@pytest.mark.parametrize(("values", "expected"), [
    ([0.0, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ([-0.13, 0.21], [-0.2, -0.1, 0.0, 0.1, 0.2, 0.3]),
    ([1, 40], [0, 10, 20, 30, 40]),
    ([5.0], [2, 3, 4, 5, 6, 7, 8]),
    ([0.0, 0.0], [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]),
    ([5e-4, 5e-4], [0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008]),
    ([5e-4, 5e-4 + 1e-17], [0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008]),
    ([48.0, 48.00000000000001], [20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]),
    ([2e-13], [-6e-7, -4e-7, -2e-7, 0, 2e-7, 4e-7, 6e-7]),
])
def test_ticks_are_round_and_span_the_values(values: list[float], expected: list[float]) -> None:
    assert ticks(values, 5) == pytest.approx(expected)


def test_charts_draw_values_where_they_belong() -> None:
    chart = Page(line_chart("loss", {"dpo": [(0, 0), (10, 1)]}))
    assert chart.all("polyline") == [{"class": "v-dpo", "points": "48.0,156.0 306.0,10.0"}]
    assert chart.all("svg")[0]["aria-label"] == "loss: dpo from 0 to 1"
    chart = Page(interval_chart("WER", {"dpo": (-1, 0, 1)}))
    zero, row = (next(each for each in chart.all("line") if each["class"] == name) for name in ("zero", "v-dpo"))
    assert zero["x1"] == chart.all("circle")[0]["cx"] == "177.0"
    assert (row["x1"], row["x2"]) == ("48.0", "306.0")


def test_the_stages_write_the_same_files_twice(tmp_path: Path, root: Path) -> None:
    write(tmp_path / "data" / "evaluate", random_voices(prompts=6, draws=1, voices=("base", "sft", "grpo")))
    training = tmp_path / "data" / "train_grpo"
    training.mkdir()
    (training / "curves.csv").write_text("step,loss\n1,0.5\n2,0.4\n")
    (training / "validation.csv").write_text("step,composite\n0,0.5\n2,0.6\n")
    (training / "manifest.json").write_text('{"fingerprint": "1a8612e569fb6371"}')
    (tmp_path / "params.yaml").write_bytes((root / "recipes" / "demo.yaml").read_bytes())
    runs = []
    for _ in range(2):
        for stage in ("compare", "report"):
            subprocess.run([sys.executable, "-m", f"stages.{stage}"], cwd=tmp_path, check=True,
                           env=os.environ | {"PYTHONPATH": str(root)})
        runs.append({path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()})
    assert runs[0] == runs[1] and len(runs[0]) == 5
    page = (tmp_path / "results" / "report.html").read_text(encoding="utf-8")
    assert "1a8612e569fb6371" in page and page.count("<audio ") == 6 * 3
    assert "Not evaluated: dpo, kto." in (tmp_path / "results" / "comparison.md").read_text(encoding="utf-8")
    assert read_evaluations(tmp_path / "data" / "evaluate", ["sft"])["sft"].takes.num_rows == 6
