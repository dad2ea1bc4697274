"""Peak memory and time of the merge at the published 0.6B size, beside PEFT's own on the loaded model.

    python -m benchmarks.merge [--work DIR] [--peer]

Makes the checkpoint of `benchmarks.full_size` in DIR (default: a temporary folder) unless it is there, merges it
twice in processes of their own, and prints one JSON line. `ratio`: the peak of PEFT over ours; `same_bytes`: both
merges are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the stages have it; read when torch loads

import torch
from safetensors.torch import save_file

from swaralign.artifacts import sha256_file, sha256_tree
from swaralign.merge import build_merge
from swaralign.mlx_lora import WEIGHTS_FILE
from swaralign.official import Qwen3TTSForConditionalGeneration
from swaralign.params import AssetsParams, LocalAsset, MergeParams, load_params

BYTES = 1024 if sys.platform == "linux" else 1  # in which ru_maxrss counts
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer", action="store_true", help="also merge by PEFT")
    parser.add_argument("--only", choices=("ours", "peft"), help=argparse.SUPPRESS)
    parser.add_argument("--run", default="one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(ours(args.work, args.run) if args.only == "ours" else peft(args.work)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(args.work or Path(folder), args.peer)))


def compare(work: Path, peer: bool) -> dict[str, Any]:
    """What the JSON line holds."""
    if not (work / "adapter").is_dir():
        subprocess.run([sys.executable, "-m", "benchmarks.full_size", work], check=True, stdout=subprocess.DEVNULL)
    one, two = (_in_a_process(work, "ours", run) for run in ("one", "two"))
    line = {"benchmark": "merge", "checkpoint_gb": round((work / "base" / WEIGHTS_FILE).stat().st_size / GB, 3),
            **{key: one[key] for key in ("seconds", "cpu_seconds", "peak_gb", "imports_gb")},
            "same_bytes": one["sha256"] == two["sha256"], "threads": torch.get_num_threads()}
    if peer:
        other = _in_a_process(work, "peft", "peft")
        line |= {f"peft_{key}": other[key] for key in ("seconds", "cpu_seconds", "peak_gb")}
        line["ratio"] = round(other["peak_gb"] / one["peak_gb"], 2)
    return line


def ours(work: Path, run: str) -> dict[str, Any]:
    """The merge stage's work on verified files, and the peak of this process."""
    assets, imports_gb = _assets(work), _peak_gb()
    began, cpu_began = time.perf_counter(), time.process_time()
    build_merge(work / "base", work / "adapter", assets,
                MergeParams(orientation="peft", scale=None, expected_modules=231), work / run)
    measured = {"seconds": round(time.perf_counter() - began, 1), "peak_gb": _peak_gb(), "imports_gb": imports_gb,
                "cpu_seconds": round(time.process_time() - cpu_began, 1)}
    return measured | {"sha256": sha256_file(work / run / "checkpoint" / WEIGHTS_FILE)}


def peft(work: Path) -> dict[str, Any]:
    """The same by loading the model in float32 and `merge_and_unload`."""
    from peft import PeftModel

    began, cpu_began = time.perf_counter(), time.process_time()
    model = Qwen3TTSForConditionalGeneration.from_pretrained(work / "base", dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(model, work / "one" / "adapter").merge_and_unload()
    save_file(merged.to(torch.bfloat16).state_dict(), work / "peft.safetensors", metadata={"format": "pt"})
    return {"seconds": round(time.perf_counter() - began, 1), "peak_gb": _peak_gb(),
            "cpu_seconds": round(time.process_time() - cpu_began, 1)}


def _assets(work: Path) -> AssetsParams:
    pinned = {name: LocalAsset(source="local", path=str(work / name), id=f"random/{name}", revision="1",
                               files=sha256_tree(work / name)) for name in ("base", "adapter")}
    return load_params(Path("recipes/demo.yaml")).assets.model_copy(update=pinned)


def _in_a_process(work: Path, only: str, run: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.merge", "--work", str(work), "--only", only, "--run", run]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    answer: dict[str, Any] = json.loads(told.splitlines()[-1])
    return answer


def _peak_gb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES / GB, 3)


if __name__ == "__main__":
    main()
