"""The page in headless Chromium: no error on its console, takes that play to their end, a search, a phone's width."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from typing import Any

import pytest
from evaluations import random_voices
from test_report import ALL, inputs

from swaralign.report.page import render_page, widest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 300  # until the browser is ended, whatever it does
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--mute-audio",
         "--autoplay-policy=no-user-gesture-required")
PROBE = """<!doctype html><iframe src="report.html" width="375" height="700"></iframe><script>
const frame = document.querySelector("iframe");
const ends = (audio) => new Promise((resolve) => {
  audio.addEventListener("ended", () => resolve(true));
  setTimeout(() => resolve(false), 60000);
});
frame.addEventListener("load", async () => {
  const page = frame.contentDocument, players = [...page.querySelectorAll("audio")];
  const told = { readyState: [], ended: [] };
  for (const player of players.slice(0, 2)) {
    const end = ends(player);
    await player.play();
    told.readyState.push(player.readyState);
    told.ended.push(await end);
  }
  players[2].loop = players[3].loop = true;
  await players[2].play();
  await players[3].play();
  told.paused = [players[2].paused, players[3].paused];
  told.overflow = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  const query = page.getElementById("query");
  query.value = "P-7";
  query.dispatchEvent(new Event("input"));
  told.found = page.getElementById("found").textContent;
  told.shown = [...page.getElementById("list").children].filter((item) => item.offsetHeight).length;
  console.log("PROBE " + JSON.stringify(told));
});
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What stands on the console of a page that frames the report, to where the probe tells what it found."""
    folder = tmp_path_factory.mktemp("report")
    voices = random_voices(prompts=12, draws=2, voices=ALL)
    (folder / "report.html").write_text(render_page(inputs(voices, widest(voices, 2))), encoding="utf-8")
    (folder / "probe.html").write_text(PROBE, encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", (folder / "probe.html").as_uri()]
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    timer = threading.Timer(SECONDS, browser.kill)
    timer.start()
    lines = []
    assert browser.stderr is not None
    for line in browser.stderr:
        lines += [line] if "CONSOLE" in line else []
        if "PROBE " in line:
            break
    timer.cancel()
    browser.kill()
    browser.wait()
    return lines


@pytest.fixture(scope="module")
def told(console: list[str]) -> dict[str, Any]:
    assert console and "PROBE " in console[-1], console
    told: dict[str, Any] = json.JSONDecoder().raw_decode(console[-1].partition("PROBE ")[2])[0]
    return told


def test_nothing_but_the_probe_stands_on_the_console(console: list[str], told: dict[str, Any]) -> None:
    assert len(console) == 1


def test_takes_play_to_their_end_one_at_a_time(told: dict[str, Any]) -> None:
    assert told["readyState"] == [4, 4] and told["ended"] == [True, True]  # HAVE_ENOUGH_DATA
    assert told["paused"] == [True, False]


def test_the_search_leaves_what_was_asked_for(told: dict[str, Any]) -> None:
    assert told["found"] == "1 of 12 prompts" and told["shown"] == 1


def test_the_page_fits_a_phone(told: dict[str, Any]) -> None:
    assert told["overflow"] == 0
