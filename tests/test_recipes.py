"""The shipped recipes: params.yaml is the demo, and choosing one never loses edits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from swaralign.cli import main


@pytest.fixture
def clone(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes and the demo as params.yaml, as a clone has them."""
    shutil.copytree(root / "recipes", tmp_path / "recipes")
    shutil.copy(root / "recipes" / "demo.yaml", tmp_path / "params.yaml")
    demo = (tmp_path / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "recipes" / "other.yaml").write_text(demo + "# other\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_params_as_shipped_are_the_demo(root: Path) -> None:
    """In the last commit, so that edits of params.yaml do not fail it."""
    shipped = [
        subprocess.run(["git", "show", f"HEAD:{path}"], cwd=root, check=True, capture_output=True).stdout
        for path in ("params.yaml", "recipes/demo.yaml")
    ]
    assert shipped[0] == shipped[1]


def test_list_marks_the_current_one(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "* demo" in lines
    assert "  other" in lines
    assert len(lines) == len(list(clone.glob("recipes/*.yaml")))


def test_use_copies_the_recipe(clone: Path) -> None:
    assert main(["recipe", "use", "other"]) == 0
    assert (clone / "params.yaml").read_bytes() == (clone / "recipes" / "other.yaml").read_bytes()


def test_use_without_params(clone: Path) -> None:
    (clone / "params.yaml").unlink()
    assert main(["recipe", "use", "demo"]) == 0
    assert (clone / "params.yaml").read_bytes() == (clone / "recipes" / "demo.yaml").read_bytes()


def test_use_keeps_edits_unless_forced(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = (clone / "params.yaml").read_text(encoding="utf-8") + "# mine\n"
    (clone / "params.yaml").write_text(edited, encoding="utf-8")
    assert main(["recipe", "use", "other"]) == 1
    assert "params.yaml has edits that no recipe holds" in capsys.readouterr().err
    assert (clone / "params.yaml").read_text(encoding="utf-8") == edited
    assert main(["recipe", "use", "other", "--force"]) == 0
    assert (clone / "params.yaml").read_text(encoding="utf-8").endswith("# other\n")


def test_use_of_an_unknown_recipe(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (clone / "params.yaml").read_bytes()
    assert main(["recipe", "use", "dmo"]) == 1
    assert "no recipe 'dmo'; there is demo" in capsys.readouterr().err
    assert (clone / "params.yaml").read_bytes() == before


def test_use_of_a_broken_recipe(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (clone / "params.yaml").read_bytes()
    (clone / "recipes" / "broken.yaml").write_text("grpo: {}\n", encoding="utf-8")
    assert main(["recipe", "use", "broken"]) == 1
    assert "broken.yaml is not valid" in capsys.readouterr().err
    assert (clone / "params.yaml").read_bytes() == before


def test_outside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "list"]) == 1
    assert "no recipes in recipes/; run this in the root of a clone" in capsys.readouterr().err
