"""What lies on the hub: files at a pinned commit, fetched into its usual cache, or rows that are read in place.

The library of the hub does the work: it resumes what was cut off, uses the usual login, and with HF_HUB_OFFLINE=1 asks
the network nothing. Here its faults become messages that say what to do.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import huggingface_hub as hf  # loads its parts when they are used, so that this import costs nothing
from huggingface_hub import constants

from swaralign.artifacts import fingerprint, sha256_file, write_json
from swaralign.params import HubAsset, HubRowsAsset


def cache_root() -> Path:
    """Where what is made from assets is kept: `$SWARALIGN_CACHE`, or `~/.cache/swaralign`."""
    return Path(os.environ.get("SWARALIGN_CACHE") or Path.home() / ".cache" / "swaralign")


# Files


def fetch(name: str, asset: HubAsset, file: str) -> Path:
    """The path of a file in the hub's cache, fetched if it is not there. Raises ValueError as `told` does."""
    with told(name, asset):
        return Path(hf.hf_hub_download(asset.id, file, repo_type=asset.repo_type, revision=asset.revision))


def is_cached(asset: HubAsset) -> bool:
    """Whether every file lies in the hub's cache."""
    return all(_in_cache(asset.id, file, asset.repo_type, asset.revision) for file in asset.files)


def cached(name: str, asset: HubAsset, file: str) -> Path:
    """The path of a file in the hub's cache. Raises ValueError if it was not fetched yet."""
    path = _in_cache(asset.id, file, asset.repo_type, asset.revision)
    if path is None:
        raise ValueError(
            f"assets.{name}: {file} of {asset.id} at revision {asset.revision} is not in the hub's cache yet; "
            "`python -m stages.assets` fetches it"
        )
    return path


def commit_hash_fault(path: Path) -> str | None:
    """How a cached file differs from what the hub stated for it at its commit, or None if it does not.

    The cache names a blob by what the commit records of it: the SHA-256 of a large file, git's id of a small one.
    """
    stated = path.resolve().name
    if len(stated) == 64:
        found = sha256_file(path)
    else:
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return None if found == stated else f"expected {stated}, as the commit records it, found {found}"


def _in_cache(repo: str, file: str, repo_type: str, revision: str) -> Path | None:
    found = hf.try_to_load_from_cache(repo, file, repo_type=repo_type, revision=revision)
    return Path(found) if isinstance(found, str) else None


# Rows


@dataclass(frozen=True)
class HubFile:
    """A file of a hub dataset at a commit that is read in place, a range of bytes at a time.

    `sha256`: what the commit records of it; nothing here reads enough of it to check that.
    """

    asset: HubRowsAsset
    path: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.asset.id}/{self.path}"

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open it for reading, from the hub's cache if it is there. Each read of the remote one is one request.

        A request that fails is repeated by the hub's library. Raises ValueError as `told` does.
        """
        asset = self.asset
        local = _in_cache(asset.id, self.path, "dataset", asset.revision)
        if local is not None:
            with local.open("rb") as stream:
                yield stream
            return
        with told("prompts", asset), _open_in_place(asset, self.path) as remote:
            yield remote


def _open_in_place(asset: HubRowsAsset, path: str) -> Any:
    try:
        name = f"datasets/{asset.id}@{asset.revision}/{path}"
        return hf.HfFileSystem(skip_instance_cache=True).open(name, "rb", cache_type="none")
    except FileNotFoundError:  # whatever the hub refuses; it is asked again for what says why
        _ask_for_files(asset)
        raise


def list_rows(name: str, asset: HubRowsAsset) -> list[HubFile]:
    """The files of the asset's pattern, sorted by name. Raises ValueError as `told` does, or if there is none.

    What a commit holds never changes: it is asked once, then read from our cache.
    """
    listing = cache_root() / "hub" / f"{fingerprint([asset.id, asset.revision, asset.pattern])}.json"
    if not listing.is_file():
        with told(name, asset):
            write_json(listing, _ask_for_files(asset))
    hashes = json.loads(listing.read_text(encoding="utf-8"))
    if not hashes:
        raise ValueError(f"assets.{name}: {asset.id} at revision {asset.revision} has no file {asset.pattern}; "
                         f"correct assets.{name}.pattern")
    return [HubFile(asset, path, sha256) for path, sha256 in sorted(hashes.items())]


def _ask_for_files(asset: HubRowsAsset) -> dict[str, str]:
    api = hf.HfApi()
    api.auth_check(asset.id, repo_type="dataset")  # a gated dataset may list its files to everyone
    folder = asset.pattern.rpartition("/")[0] or None
    tree: Any = api.list_repo_tree(asset.id, folder, repo_type="dataset", revision=asset.revision)
    return {entry.path: entry.lfs.sha256 for entry in tree
            if fnmatch.fnmatchcase(entry.path, asset.pattern) and getattr(entry, "lfs", None)}


# Faults


@contextmanager
def told(name: str, asset: HubAsset | HubRowsAsset) -> Iterator[None]:
    """Turn what the hub's library raises into a ValueError that names the asset and says what to do."""
    import httpx
    from huggingface_hub import errors

    what = f"assets.{name}: {asset.id} at revision {asset.revision}"
    kind = "datasets/" if isinstance(asset, HubRowsAsset) or asset.repo_type == "dataset" else ""
    page = f"{constants.ENDPOINT}/{kind}{asset.id}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(f"{what} is gated: log in at {page}, accept its terms, then run `hf auth login` here with a "
                         "token of that account (or set HF_TOKEN) and start again") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{what}: the repository has no such revision; correct assets.{name}.revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{what}: no such repository at {page}, or a private one; correct assets.{name}.id, or run "
                         "`hf auth login` with a token that may read it") from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(_unreachable(what, error)) from error
    except errors.EntryNotFoundError as error:
        key = "pattern" if isinstance(asset, HubRowsAsset) else "files"
        raise ValueError(f"{what} lacks what is asked for: {_first_line(error)}; correct assets.{name}.{key}"
                         ) from error
    except (errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        raise ValueError(_unreachable(what, error)) from error


def _unreachable(what: str, error: BaseException) -> str:
    if hf.is_offline_mode():
        return (f"{what}: not all of it is in the cache, and HF_HUB_OFFLINE forbids to fetch the rest; "
                "run once without it, or copy the cache of a machine that has it")
    cause = error.__cause__ or error
    if (answer := getattr(cause, "response", None)) is not None:
        remedy = ("it refuses this token: run `hf auth login` again, or correct or unset HF_TOKEN"
                  if answer.status_code in (401, 403) else "try again later")
        return f"{what}: the hub answers {answer.status_code}, {_first_line(cause)}; {remedy}"
    return (f"{what}: no connection to {constants.ENDPOINT} ({type(cause).__name__}: {_first_line(cause)}); check the "
            "network and run again, whole files are kept. HF_HUB_OFFLINE=1 uses the cache alone")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
