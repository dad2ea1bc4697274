"""Where a run happens: the clone itself, or, for a run whose params are not those at hand, a git worktree of its own.

A worktree lies in .dvc/tmp/flows/, under a name made of the tracked files and the params: the same run again finds it,
outs and all. It begins from the clone's dvc.lock and shares DVC's cache, so that nothing is computed twice, and runs/,
so that a stopped training goes on from its checkpoint. Local assets that are not in git are linked. The clone's working
tree and index are not touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from dvc.config import Config
from dvc.repo import Repo

from flows.recipe import check
from swaralign.artifacts import fingerprint, write_text
from swaralign.params import AssetsParams, LocalAsset

WORKTREES = Path(".dvc/tmp/flows")
RUNS = Path("runs")
REPLACED = ("params.yaml", "dvc.lock")  # a worktree has its own
KEEP_S = 14 * 24 * 3600  # seconds that a worktree stays after its last run


@contextmanager
def workspace(root: Path, params: str) -> Iterator[Path]:
    """The folder to run in: `root` when its params.yaml has these params, else a worktree which has.

    Args:
        params: text of the params file.

    Raises:
        ValueError: git or DVC cannot make the worktree; the message holds what git said.
    """
    if (root / "params.yaml").is_file() and (root / "params.yaml").read_text(encoding="utf-8") == params:
        yield root
        return
    commit = _snapshot(root)
    files = [line for line in _git(root, "ls-tree", "-r", commit).splitlines() if line.split("\t")[1] not in REPLACED]
    path = root / WORKTREES / fingerprint([files, params])
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / "lock", fcntl.LOCK_EX):
        _remove_old(root)
        if not (path / ".dvc/config.local").is_file():  # written last: a folder without it is half made
            _make(root, path, commit, params)
        _link_assets(root, path, check(params).assets)
        in_use = _lock(path.with_suffix(".use"), fcntl.LOCK_SH)
        os.utime(path.with_suffix(".use"))
    with in_use:
        yield path


def _make(root: Path, path: Path, commit: str, params: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    _git(root, "worktree", "prune")
    # Forced twice: of a making that was killed git still has a locked entry. No hooks: DVC's would check out before the
    # cache is shared.
    _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "-f", "-f", "--detach", str(path), commit)
    write_text(path / "params.yaml", params)
    if (root / "dvc.lock").is_file():
        shutil.copyfile(root / "dvc.lock", path / "dvc.lock")
    (root / RUNS).mkdir(exist_ok=True)
    (path / RUNS).symlink_to(root / RUNS)
    _share_cache(root, path)
    Repo(str(path)).checkout(allow_missing=True)  # at once, what a stage each would take from the cache


def _share_cache(root: Path, path: Path) -> None:
    """DVC's cache and remotes of the clone, its local configuration included, paths made absolute."""
    ours = Repo(str(root))
    with Config(str(path / ".dvc")).edit("local") as theirs:
        theirs["cache"] = {**ours.config["cache"], "dir": ours.cache.legacy.path}
        theirs["remote"] = ours.config["remote"]
        theirs["core"] = {key: value for key, value in ours.config["core"].items() if key == "remote"}


def _link_assets(root: Path, path: Path, assets: AssetsParams) -> None:
    """The local files of assets that are not in git, such as models, where the params look for them."""
    for asset in (getattr(assets, name) for name in AssetsParams.model_fields):
        if not isinstance(asset, LocalAsset):
            continue
        for file in asset.files:
            ours, theirs = (folder / Path(asset.path).expanduser() / file for folder in (root, path))
            if ours.is_file() and not theirs.exists():
                theirs.parent.mkdir(parents=True, exist_ok=True)
                theirs.symlink_to(ours)


def _snapshot(root: Path) -> str:
    """A commit of the tracked files as they are on disk; HEAD itself when nothing differs from it."""
    with TemporaryDirectory() as folder:  # a copy of the index: git would lock and rewrite the clone's own
        env = {**os.environ, "GIT_INDEX_FILE": str(Path(folder) / "index")}
        index = root / _git(root, "rev-parse", "--git-path", "index")
        if index.is_file():
            shutil.copy2(index, env["GIT_INDEX_FILE"])  # with its time, by which git doubts what was edited just then
        _git(root, "add", "--update", ":/", env=env)
        tree = _git(root, "write-tree", env=env)
    if tree == _git(root, "rev-parse", "HEAD^{tree}"):
        return _git(root, "rev-parse", "HEAD")
    named = ["-c", "user.name=swaralign", "-c", "user.email=swaralign@localhost"]  # this commit is on no branch
    return _git(root, *named, "commit-tree", tree, "-p", "HEAD", "-m", "Files of a run with params of its own")


def _remove_old(root: Path) -> None:
    """Remove the worktrees that no run has used for long and none is using."""
    for mark in (root / WORKTREES).glob("*.use"):
        if time.time() - mark.stat().st_mtime < KEEP_S:
            continue
        with suppress(BlockingIOError), _lock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(mark.with_suffix(""), ignore_errors=True)
            mark.unlink()
            _git(root, "worktree", "prune")


def _lock(path: Path, operation: int) -> IO[bytes]:
    """An open file that holds the lock until it is closed, at the latest by the end of this process."""
    file = path.open("ab")
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        file.close()
        raise
    return file


def _git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)} in {root} failed: {done.stderr.strip()}")
    return done.stdout.strip()
