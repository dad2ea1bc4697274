"""The flow `align`: DVC's graph as task runs, one a stage.

    prefect deployment run align/on-demand --param 'set_params={"grpo.schedule.updates": 4}'

What is out of date, what it depends on and what is cached is DVC's to say; Prefect runs, shows, schedules and stops it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Completed, Failed

from flows.artifacts import publish
from flows.graph import read_graph
from flows.processes import Processes
from flows.recipe import check, params_text
from flows.run import Run
from flows.workspace import workspace
from swaralign.params import FlowParams


@flow(name="align", persist_result=False, log_prints=False)
def align(
    targets: list[str] | None = None,
    recipe: str | None = None,
    set_params: dict[str, Any] | None = None,
    force: bool = False,
    pull: bool = False,
    push: bool = False,
    max_parallel: int | None = None,
) -> State[None]:
    """Bring the stages of DVC's graph up to date, in the clone that the process runs in.

    Args:
        targets: stages, or groups such as `evaluate`, to bring up to date with all that they need; none means all.
        recipe: a file in recipes/; none means params.yaml as it is.
        set_params: values by dotted key, e.g. {"grpo.schedule.learning_rate": 1e-6}. Such a run, like one of a recipe
            that params.yaml is not a copy of, has a git worktree of its own.
        force: run the command of every stage, unchanged or not. `candidates` and the trainings still find the chunks,
            checkpoints and finished work that runs/ holds of the same inputs.
        pull: take from DVC's default remote and its run cache what another machine has pushed, instead of running it.
        push: send the outs of every stage there as soon as it is done.
        max_parallel: stages that run side by side, 1 or more; none means as many as `runtime.threads` leaves cores for.

    Raises:
        ValueError: an unknown target, recipe or key, or a value that the params model refuses; nothing has run then.

    Returns a `Failed` state with the last lines of every stage that failed; those that do not depend on it have run.
    """
    if max_parallel is not None and max_parallel < 1:
        raise ValueError(f"max_parallel is {max_parallel}; 1 or more stages run side by side")
    root = Path.cwd()
    text = params_text(root, recipe, set_params or {})
    params = check(text)
    settings = params.flow
    with workspace(root, text) as path:
        run = Run(path, read_graph(path, targets or ()), Processes(settings.grace_s), force=force, pull=pull, push=push)
        states: dict[str, State[Any]] = {}
        try:
            for name, state in walk(run, settings, max_parallel or as_many_as_fit(params.runtime.threads)):
                states[name] = state
        finally:
            run.processes.stop()
        publish(root, text, run, states)
    failed = [str(state.message) for state in states.values() if not state.is_completed()]
    return Failed(message="\n".join(failed)) if failed else Completed()


def as_many_as_fit(threads: int) -> int:
    """Stages of so many threads that this machine's cores can run at once: more of them would slow each other down."""
    return max(1, (os.cpu_count() or 1) // threads)


@task(task_run_name="{name}", persist_result=False, cache_policy=NO_CACHE)
def stage(name: str, run: Run) -> State[None]:
    """One stage; Prefect's result cache is off, since DVC knows what is up to date."""
    return run.stage(name)


def walk(run: Run, settings: FlowParams, max_parallel: int) -> Iterator[tuple[str, State[Any]]]:
    """Submit each stage when those upstream of it are done, so many at a time; yields each with its state as it ends.

    A stage below one that did not complete is never submitted.
    """
    order = TopologicalSorter({name: found.upstream for name, found in run.stages.items()})
    order.prepare()
    ready = list(order.get_ready())
    running: dict[PrefectFuture[Any], str] = {}
    done: dict[str, PrefectFuture[Any]] = {}
    while ready or running:
        while ready and len(running) < max_parallel:
            name = ready.pop(0)
            running[submit(name, run, settings, [done[above] for above in run.stages[name].upstream])] = name
        future = next(as_completed(list(running)))
        future.wait()
        name = running.pop(future)
        done[name] = future
        if future.state.is_completed():
            order.done(name)
            ready += order.get_ready()
        yield name, future.state


def submit(name: str, run: Run, settings: FlowParams, upstream: list[PrefectFuture[Any]]) -> PrefectFuture[Any]:
    """The task run of a stage, begun; retried if the stage talks to the outside."""
    retries = settings.retries if run.stages[name].outside else 0
    named = stage.with_options(name=name, retries=retries, retry_delay_seconds=settings.retry_delay_s)
    return named.submit(name, run, return_state=False, wait_for=upstream)
