"""DVC's graph as the flow needs it: which stages there are, what they wait for, and why DVC would run one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import networkx as nx
from dvc.dependency import ParamsDependency
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.stage import PipelineStage
from ruamel.yaml import YAML

from flows.recipe import PARAMS, differing, leaves

BUSY_S = 1.0  # between two looks at a lock that another DVC process holds
_one_repo = threading.Lock()  # DVC's own locks are between processes, not between threads


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml."""

    name: str
    upstream: frozenset[str]  # the stages whose outs it reads
    outs: tuple[str, ...]  # relative to the repository
    gpu: bool  # takes a slot of the concurrency limit `gpu`
    outside: bool  # talks to the outside, so retried


def read_graph(root: Path, targets: Sequence[str] = ()) -> dict[str, Stage]:
    """The stages that the targets need, all of them without targets; each after those it waits for.

    Args:
        targets: names of stages, or of groups of stages such as `evaluate`.

    Raises:
        ValueError: no such stage; the message names those there are, or a mark in dvc.yaml means nothing.
    """
    params = dict(leaves(YAML(typ="safe", pure=True).load((root / PARAMS).read_text(encoding="utf-8"))))
    with _one_repo:
        graph = _repo(root, _stamp(root)).index.graph  # edges point upstream
        pipeline = {stage.name: stage for stage in graph if isinstance(stage, PipelineStage)}
        wanted = {pipeline[name] for target in targets for name in _named(target, pipeline)} or set(pipeline.values())
        wanted |= {above for stage in wanted for above in nx.descendants(graph, stage)}
        order = nx.lexicographical_topological_sort(graph.reverse(), key=lambda stage: stage.addressing)
        return {stage.name: _describe(stage, graph, root, params) for stage in order if stage in wanted}


def changes(root: Path, name: str) -> list[str]:
    """What differs from the stage's last run, one entry a thing: `param grpo.beta`, `dep data/split`, `out x deleted`.

    Empty when DVC would not run it. Waits while another DVC process writes what this stage reads.
    """
    while True:
        try:
            with _one_repo:
                stamp = _stamp(root)
                repo = _repo(root, stamp)
                with repo.lock:
                    if stamp == _stamp(root):
                        return _changes(repo, name)
        except LockError:
            time.sleep(BUSY_S)


def _changes(repo: Repo, name: str) -> list[str]:
    (stage,) = (found for found in repo.index.stages if getattr(found, "name", None) == name)
    status = stage.status().get(stage.addressing, [])
    known = any(dep.hash_info for dep in stage.deps)  # from dvc.lock
    return list(_entries(stage, status)) if known or not status else ["no run in dvc.lock"]


@lru_cache(maxsize=1)
def _repo(root: Path, stamp: tuple[int, ...]) -> Repo:
    """DVC's view of the repository, read again when dvc.yaml or dvc.lock is another: reading them is the slow part."""
    return Repo(str(root), _wait_for_lock=True)


def _stamp(root: Path) -> tuple[int, ...]:
    files = [root / name for name in ("dvc.yaml", "dvc.lock")]
    return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files)


def _named(target: str, names: Iterable[str]) -> list[str]:
    """The stage of that name, or the stages of that group."""
    found = [name for name in names if target in (name, name.partition("@")[0])]
    if not found:
        raise ValueError(f"targets: no stage {target!r}; there is {', '.join(sorted(names))}")
    return found


def _describe(stage: PipelineStage, graph: nx.DiGraph, root: Path, params: dict[str, Any]) -> Stage:
    """Raises ValueError for a key of `meta` that means nothing to the flow."""
    meta = stage.meta or {}
    if unknown := set(meta) - {"gpu", "outside"}:
        raise ValueError(f"dvc.yaml: meta of {stage.name} has {sorted(unknown)}; it may hold gpu and outside")
    upstream = frozenset(above.name for above in graph.successors(stage) if isinstance(above, PipelineStage))
    outs = tuple(Path(out.fs_path).relative_to(root).as_posix() for out in stage.outs)
    gpu, outside = (_holds(stage.name, meta.get(mark, False), params) for mark in ("gpu", "outside"))
    return Stage(stage.name, upstream, outs, gpu, outside)


def _holds(name: str, mark: bool | str, params: dict[str, Any]) -> bool:
    """Whether a mark of a stage holds: `true` always, `runtime.device=cuda` where params.yaml has that value."""
    if isinstance(mark, bool):
        return mark
    key, _, value = str(mark).partition("=")
    if key not in params:
        raise ValueError(f"dvc.yaml: meta of {name} has {mark!r}; write true, or KEY=VALUE with a key of {PARAMS}")
    return str(params[key]) == value


def _entries(stage: PipelineStage, status: list[Any]) -> Iterator[str]:
    """DVC's status of a stage, flattened; what is merely modified is named without saying so."""
    for entry in status:
        if isinstance(entry, str):  # "changed command"
            yield entry
            continue
        for kind, things in entry.items():  # "changed deps" or "changed outs"
            for name, state in things.items():
                if isinstance(state, dict):  # a params file: the sections that differ
                    yield from _param_entries(stage, name, state)
                else:
                    yield _entry(kind.removeprefix("changed ").removesuffix("s"), name, state)


def _param_entries(stage: PipelineStage, file: str, sections: dict[str, str]) -> Iterator[str]:
    """Of a section that is modified the keys that are: dvc.lock holds the values of the last run."""
    (dep,) = (dep for dep in stage.deps if isinstance(dep, ParamsDependency) and str(dep) == file)
    then, now = dep.hash_info.value, dep.read_params()
    for name, state in sections.items():
        if state == "modified":
            yield from (f"param {key}" for key, *_ in differing({name: then[name]}, {name: now[name]}))
        else:
            yield f"param {name} {state}"


def _entry(kind: str, name: str, state: str) -> str:
    return f"{kind} {name}" if state == "modified" else f"{kind} {name} {state}"
