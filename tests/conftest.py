"""What the tests share: the repository's root, the demo recipe as data, and no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from flow_lab import Lab

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the hub is wrong
os.environ["DVC_NO_ANALYTICS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "10000"  # as the stages have it
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def demo() -> dict[str, Any]:
    """The demo recipe as a fresh mapping that a test may edit."""
    data: dict[str, Any] = YAML(typ="safe").load((ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8"))
    return data


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A Prefect server of the module's own, and what is done with it."""
    from flow_lab import Lab  # loads Prefect, which few tests need

    from flows import serve

    lab = Lab(tmp_path_factory.mktemp("prefect"))
    yield lab
    serve.stop(lab.server)
