"""What `swaralign check` looks at: the params, the environment and the machine, without loading torch or a model."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name

from swaralign.assets import locate, resolve
from swaralign.hub import is_cached
from swaralign.params import (
    AssetsParams,
    HubAsset,
    HubRowsAsset,
    Params,
    RewardParams,
    RuntimeParams,
    TrackingParams,
    load_params,
)

GIB = 2**30
ENGINE_PACKAGES = {"distillmos": "distillmos", "utmos": "utmos_pytorch", "resemblyzer": "resemblyzer",
                   "ecapa": "speechbrain"}
CUDA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, and Windows' Linux subsystem


@dataclass(frozen=True)
class Fact:
    """One line of the report: what was looked at, what was found, and whether a run can start with it."""

    subject: str
    found: str
    ok: bool = True


def check(root: Path = Path(), full: bool = False) -> list[Fact]:
    """Look at everything that a run needs in the repository at `root`; `full` also hashes the assets.

    Never raises for what is wrong with the repository: every fault is a fact that is not ok.
    """
    facts = [*environment(root), dvc_repository(root)]
    try:
        params = load_params(root / "params.yaml")
    except ValueError as error:
        return [Fact("params", str(error), ok=False), *facts]
    missing = to_fetch(params.assets)
    size, found = assets(params.assets, root, full, missing)
    return [Fact("params", "valid"), *plan(params), *facts, engines(params.reward), tracker(params.tracking),
            device(params.runtime), *found, disk(root, size, missing)]


def plan(params: Params) -> Iterator[Fact]:
    """What the numbers of the params multiply to."""
    grpo, dpo, kto, pool, evaluate = params.grpo, params.dpo, params.kto, params.candidates, params.evaluate
    prompts = pool.prompts or params.split.expected_train
    yield Fact("candidates", _product(prompts, pool.per_temperature * len(pool.temperatures), "takes"))
    yield Fact("dpo", f"{dpo.schedule.updates} updates of {dpo.pairs_per_update} pairs")
    yield Fact("kto", f"{kto.schedule.updates} updates of {kto.takes_per_update} takes")
    takes = grpo.prompts_per_update * grpo.samples_per_prompt
    batches = grpo.schedule.updates // grpo.iterations
    yield Fact("grpo", f"{grpo.schedule.updates} updates from {batches} rollout batches of "
                       f"{_product(grpo.prompts_per_update, grpo.samples_per_prompt, 'takes')}, "
                       f"in {takes // grpo.micro_batch} micro-batches of {grpo.micro_batch}")
    yield Fact("evaluation", _product(evaluate.prompts, evaluate.samples_per_prompt, "takes of each voice"))


def engines(reward: RewardParams) -> Fact:
    """Whether the packages of the reward's MOS and similarity engines are installed; who scores, for kind http."""
    if reward.kind == "http":
        from swaralign.scoring.client import connect  # loads an HTTP client, which kind local does not need

        try:
            connect(reward.http)
        except ValueError as error:
            return Fact("engines", str(error), ok=False)
        return Fact("engines", f"none here: scored by {', '.join(reward.http.urls)}")
    named = [engine for engine in (reward.mos.engine, reward.similarity.engine) if engine in ENGINE_PACKAGES]
    missing = [name for name in named if importlib.util.find_spec(ENGINE_PACKAGES[name]) is None]
    if missing:
        return Fact("engines", f"{' and '.join(missing)} of section reward not installed; `make setup`, the extra of "
                               "that name, or another engine", ok=False)
    return Fact("engines", ", ".join(["faster-whisper", *named]))


def tracker(tracking: TrackingParams) -> Fact:
    """Whether the package of the tracker is installed."""
    try:
        tracking.check_installed()
    except ValueError as error:
        return Fact("tracker", str(error), ok=False)
    return Fact("tracker", tracking.tracker)


def _product(prompts: int, samples: int, what: str) -> str:
    return f"{prompts} prompts x {samples} samples = {prompts * samples} {what}"


def environment(root: Path) -> Iterator[Fact]:
    """The running Python and the installed packages against pyproject.toml and constraints.txt."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pinned = (root / "constraints.txt").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        yield Fact("packages", f"{error.filename} does not exist: run this in the root of a clone", ok=False)
        return
    wanted, running = project["requires-python"], platform.python_version()
    yield Fact("python", f"{running}, {wanted} is needed", ok=SpecifierSet(wanted).contains(running))
    needed = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    faults = list(package_faults(needed, _pins(pinned)))
    yield from (Fact("packages", f"{fault}; `make setup` installs what is pinned", ok=False) for fault in faults)
    if not faults:
        yield Fact("packages", f"{len(needed)} are needed and installed; all at their pinned versions")


def package_faults(needed: set[NormalizedName], pins: dict[NormalizedName, str]) -> Iterator[str]:
    """Needed packages that are not installed, and installed ones at another version than the pinned one."""
    installed = {canonicalize_name(found.name): found.version for found in metadata.distributions()}
    for name in sorted(needed - set(installed)):
        yield f"{name} is not installed"
    for name in sorted(set(pins) & set(installed)):
        # A build for one kind of GPU has a local suffix (2.14.1+cu130) and is that version all the same.
        if not SpecifierSet(f"=={pins[name]}").contains(installed[name], prereleases=True):
            yield f"{name} is {installed[name]}, constraints.txt pins {pins[name]}"


def dvc_repository(root: Path) -> Fact:
    """Whether DVC is initialised and its graph is there."""
    missing = [name for name in (".dvc/config", "dvc.yaml") if not (root / name).is_file()]
    if missing:
        return Fact("dvc", f"{' and '.join(missing)} not found: run this in the root of a clone", ok=False)
    return Fact("dvc", "initialised")


def device(runtime: RuntimeParams) -> Fact:
    """CUDA only where there is a device of its kind; the threads beside the cores."""
    if runtime.device == "cpu":
        return Fact("device", f"cpu, {runtime.threads} threads on {os.cpu_count()} cores")
    found = [path for path in CUDA_DEVICES if Path(path).exists()]
    if not found:
        return Fact("device", "runtime.device is 'cuda', but this machine has no NVIDIA device; use 'cpu'", ok=False)
    return Fact("device", f"cuda, {found[0]}")


def to_fetch(params: AssetsParams) -> list[str]:
    """The assets whose files are on the hub and not all in its cache here."""
    named = {name: getattr(params, name) for name in AssetsParams.model_fields}
    return [name for name, asset in named.items() if isinstance(asset, HubAsset) and not is_cached(asset)]


def assets(params: AssetsParams, root: Path, full: bool, missing: Collection[str]) -> tuple[int, list[Fact]]:
    """The bytes of all assets that are there, and a fact for each asset; `full` verifies their hashes.

    `missing`: those that are still to be fetched.
    """
    total, facts = 0, []
    for name in (name for name in AssetsParams.model_fields if getattr(params, name)):
        asset = getattr(params, name)
        if isinstance(asset, HubRowsAsset) or name in missing:
            what = "read there in place" if isinstance(asset, HubRowsAsset) else "to be fetched by the first run"
            facts.append(Fact("assets", f"{name}: {asset.id} on the hub at {asset.revision[:12]}, {what}"))
            continue
        try:
            size = _bytes_of(name, params, root)
            if full:
                resolve(name, params, root)
        except ValueError as error:
            facts.append(Fact("assets", str(error), ok=False))
            continue
        total += size
        state = "every hash is right" if full else "present"
        facts.append(Fact("assets", f"{name}: {asset.id}, {size / 1e6:.1f} MB, {state}"))
    return total, facts


def disk(root: Path, asset_bytes: int, missing: Collection[str]) -> Fact:
    """Free space: three times the assets (joined files, merged checkpoint, DVC's cache) and one GiB for the rest.

    What is still `missing` here is of unknown size.
    """
    free, wanted = shutil.disk_usage(root).free, 3 * asset_bytes + GIB
    besides = f", besides what {', '.join(missing)} will take, several times over" if missing else ""
    return Fact("disk", f"{free / GIB:.1f} GiB free, up to {wanted / GIB:.1f} GiB needed{besides}", ok=free >= wanted)


def _bytes_of(name: str, params: AssetsParams, root: Path) -> int:
    sizes = {path: path.stat().st_size for paths in locate(name, params, root).values() for path in paths}
    if empty := [str(path) for path, size in sizes.items() if not size]:
        raise ValueError(f"assets.{name}: {', '.join(empty)} is empty: fetch it again")
    return sum(sizes.values())


def _pins(constraints: str) -> dict[NormalizedName, str]:
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}
