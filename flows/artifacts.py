"""What a flow run leaves in the UI: the comparison, a table of stages, the params that differ, a link to the report."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from prefect import State
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run

from flows.patience import patiently
from flows.recipe import nearest_recipe
from flows.run import Run
from swaralign.artifacts import write_text

REPORTS = Path("runs/reports")  # copies of the reports, a folder a flow run
REPORTS_URL = "SWARALIGN_REPORTS_URL"  # environment: where that folder is served, if it is
NOT_RUN = "NotRun"  # a stage below one that failed


def publish(root: Path, params: str, run: Run, states: dict[str, State[Any]]) -> None:
    """Create the artifacts of a flow run: of every out that is Markdown its text, of every HTML page a link."""
    rows = [_row(name, run, states) for name in run.stages]
    patiently(create_table_artifact, rows, key="stages", description="Each stage of this run")
    recipe, differing = nearest_recipe(root, params)
    what = f"Params that differ from recipes/{recipe}.yaml: {len(differing)}"
    patiently(create_table_artifact, differing, key="params", description=what)
    done = [out for name, state in states.items() if state.is_completed() for out in run.stages[name].outs]
    for out in done:
        if out.endswith(".md"):
            text = (run.path / out).read_text(encoding="utf-8")
            patiently(create_markdown_artifact, text, key=_key(out), description=out)
        elif out.endswith(".html"):
            link = _share(root, run.path / out)
            patiently(create_link_artifact, link, link_text=out, key=_key(out))


def _row(name: str, run: Run, states: dict[str, State[Any]]) -> dict[str, str]:
    state = states[name].name or "" if name in states else NOT_RUN
    seconds = f"{run.seconds[name]:.1f}" if name in run.seconds else ""
    return {"stage": name, "state": state, "seconds": seconds, "changed": ", ".join(run.changed.get(name, []))}


def _share(root: Path, page: Path) -> str:
    """Copy a page to where it stays and is served; returns its address."""
    copy = root / REPORTS / str(flow_run.name) / page.name
    write_text(copy, page.read_text(encoding="utf-8"))
    base = os.environ.get(REPORTS_URL)
    return f"{base.rstrip('/')}/{copy.relative_to(root / REPORTS).as_posix()}" if base else copy.as_uri()


def _key(out: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(out).stem.lower()).strip("-")
