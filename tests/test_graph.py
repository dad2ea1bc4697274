"""The graph: deps are what a stage reads and imports, and an edited key reruns what reads it and nothing else."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from dvc.dependency import ParamsDependency
from dvc.repo import Repo
from dvc.stage import PipelineStage
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("swaralign", "stages", "flows")  # each imports itself and those before it
OUTSIDE = ("tools", "benchmarks", "tests")  # these import the floors, never the other way round

EVALUATIONS = {"evaluate@base", "evaluate@sft", "evaluate@dpo", "evaluate@kto", "evaluate@grpo"}
COMPARED = {"compare", "report"}
OFFLINE = {"preferences", "train_dpo", "train_kto", "evaluate@dpo", "evaluate@kto", *COMPARED}  # what the pool feeds
SCORED = {"candidates", *OFFLINE, "train_grpo", *EVALUATIONS}
STAGES = {"assets", "split", "merge", "speaker", *SCORED}

# What an edit of a key reruns; the longest prefix counts. A new key needs a row here, and a thought.
RERUNS: dict[str, set[str]] = {
    "runtime": {"merge", "speaker", *SCORED},
    "assets": STAGES,
    "split": {"split", "speaker", *SCORED},
    "merge": {"merge", "speaker", *SCORED},
    "speaker": {"speaker", *SCORED},
    "rollout": SCORED,
    "reward": SCORED,
    "candidates": {"candidates", *OFFLINE},
    "preferences": OFFLINE,
    "dpo": {"train_dpo", "evaluate@dpo", *COMPARED},
    "kto": {"train_kto", "evaluate@kto", *COMPARED},
    "grpo": {"train_grpo", "evaluate@grpo", *COMPARED},
    "evaluate": {*EVALUATIONS, *COMPARED},
    "compare": COMPARED,
    "report": {"report"},
    "tracking": set(),
    "flow": set(),
}


def leaf_keys(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of everything in a params file that is not itself a mapping."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


KEYS = list(leaf_keys(YAML(typ="safe").load((ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8"))))


@cache
def graph() -> dict[str, tuple[PipelineStage, set[str]]]:
    """Each stage by its name, with the names of the stages that come after it, near and far."""
    index = Repo(str(ROOT)).index
    downstream = {stage: nx.ancestors(index.graph, stage) for stage in index.stages}  # DVC's edges point upstream
    return {stage.addressing: (stage, {other.addressing for other in downstream[stage]}) for stage in index.stages}


def reads(stage: PipelineStage, key: str) -> bool:
    """Whether a stage has the key, or a section around it, among its params."""
    tracked = [name for dep in stage.deps if isinstance(dep, ParamsDependency) for name in dep.params]
    return any(key == name or key.startswith(f"{name}.") for name in tracked)


def test_stages_are_those_of_the_table() -> None:
    assert set(graph()) == STAGES


@pytest.mark.parametrize("key", KEYS)
def test_edited_key_reruns(key: str) -> None:
    rows = [prefix for prefix in RERUNS if key == prefix or key.startswith(f"{prefix}.")]
    assert rows, f"{key} has no row in RERUNS: say which stages its edit reruns"
    rerun: set[str] = set()
    for name, (stage, downstream) in graph().items():
        if reads(stage, key):
            rerun |= {name, *downstream}
    assert rerun == RERUNS[max(rows, key=len)]


def test_every_row_of_the_table_has_a_key() -> None:
    assert [row for row in RERUNS if not any(key.startswith(f"{row}.") for key in KEYS)] == []


def test_tracked_params_exist() -> None:
    """A section that params.yaml does not have would never change."""
    for name, (stage, _) in graph().items():
        tracked = [key for dep in stage.deps if isinstance(dep, ParamsDependency) for key in dep.params]
        for section in tracked:
            assert any(key == section or key.startswith(f"{section}.") for key in KEYS), f"{name} tracks {section}"


@pytest.mark.parametrize("name", sorted(STAGES))
def test_deps_are_the_imported_files(name: str) -> None:
    stage, _ = graph()[name]
    module, _, _ = name.partition("@")
    assert code_deps(stage) == imported_files(ROOT / "stages" / f"{module}.py")


@pytest.mark.parametrize("name", sorted(STAGES))
def test_stage_is_documented_and_run_as_a_module(name: str) -> None:
    stage, _ = graph()[name]
    assert stage.desc
    assert stage.cmd == f"python -m stages.{name.replace('@', ' ')}"


def test_outs_are_for_dvc_and_demo_data_is_for_git() -> None:
    """DVC would otherwise write .gitignore files during the first run, and leave a clean clone changed."""
    outs = [Path(out.fs_path).relative_to(ROOT).as_posix() for stage, _ in graph().values() for out in stage.outs]
    asked = subprocess.run(["git", "check-ignore", *outs, "data/demo/corpus.parquet"], cwd=ROOT, capture_output=True)
    assert asked.stdout.decode().split() == outs
    assert all(out.use_cache and not out.persist for stage, _ in graph().values() for out in stage.outs)


@pytest.mark.parametrize("path", sorted((ROOT / "stages").glob("*.py")), ids=lambda path: path.stem)
def test_stage_file_is_thin_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    if path.stem != "__init__":
        assert f"python -m stages.{path.stem}" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.parametrize("floor", FLOORS)
def test_nothing_imports_upwards(floor: str) -> None:
    above = (*FLOORS[FLOORS.index(floor) + 1 :], *OUTSIDE)
    for path in (ROOT / floor).rglob("*.py"):
        for module in imported_modules(path):
            assert module.partition(".")[0] not in above, f"{path.relative_to(ROOT)} imports {module}"


def code_deps(stage: PipelineStage) -> set[str]:
    """Repository-relative paths of our own Python files among a stage's deps; of a folder, those in it."""
    paths = [Path(dep.fs_path) for dep in stage.deps if not isinstance(dep, ParamsDependency)]
    ours = [path for path in paths if path.relative_to(ROOT).parts[0] in FLOORS]
    files = [file for path in ours for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return {file.relative_to(ROOT).as_posix() for file in files if file.suffix == ".py"}


def imported_files(entry: Path) -> set[str]:
    """Our own files that running `entry` imports, itself and the packages around it included, as relative paths."""
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting += packages_around(path)
        waiting += [file for module in imported_modules(path) for file in module_files(module)]
    return {path.relative_to(ROOT).as_posix() for path in found}


def packages_around(path: Path) -> list[Path]:
    """The `__init__.py` of every package that a file lies in, itself left out."""
    inits = [folder / "__init__.py" for folder in path.parents if ROOT in folder.parents]
    return [init for init in inits if init != path and init.is_file()]


def module_files(module: str) -> list[Path]:
    """The file of a dotted module of ours; none for other people's modules and for names inside a module."""
    base = ROOT.joinpath(*module.split("."))
    if module.partition(".")[0] not in FLOORS:
        return []
    found, around = ([path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]
                     for place in (base, base.parent))
    assert found or around, f"{module} is imported, but no file has it"
    return found


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, at its top or in a function; `from a import b` gives both `a` and `a.b`."""
    package = path.relative_to(ROOT).parent.parts
    for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*anchor, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what stands under `if TYPE_CHECKING:`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield child
        yield from runtime_nodes(child)


def test_imports_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    files = {
        "stages/__init__.py": "",
        "stages/train.py": "from swaralign.a import b\ndef main():\n    import swaralign.inner.deep\n",
        "swaralign/__init__.py": "",
        "swaralign/a/__init__.py": "from . import side\n",
        "swaralign/a/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from swaralign import typed\n",
        "swaralign/a/side.py": "from ..other import thing\n",
        "swaralign/other.py": "import json\n",
        "swaralign/inner/__init__.py": "",
        "swaralign/inner/deep.py": "",
        "swaralign/typed.py": "",
        "swaralign/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert imported_files(tmp_path / "stages/train.py") == set(files) - {"swaralign/typed.py", "swaralign/unused.py"}
