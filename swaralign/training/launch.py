"""A training stage in several processes of one machine, by accelerate's launcher: a rank each, one set of params."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swaralign.params import GrpoParams, RuntimeParams

CONFIGS = {"none": Path("recipes/accelerate/ddp.yaml"), "fsdp": Path("recipes/accelerate/fsdp.yaml")}
# NVLink multicast is a shared resource of the host that a killed process may leave occupied
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def launch(module: str, grpo: GrpoParams, runtime: RuntimeParams) -> bool:
    """Runs `module`, with this command's arguments, in `grpo.num_processes` processes; True once all have ended well.

    Returns False where there is nothing to launch: with one process, and in each of the launched ones, which have
    joined by then. When one of them dies, the others are stopped and the caller exits with an error that names it.
    Raises ValueError for fewer GPUs than processes, or if another launcher started another number of them.
    """
    started = _started()
    if launched():
        if started != grpo.num_processes:
            raise ValueError(f"{started} processes were launched, but grpo.num_processes is {grpo.num_processes}; "
                             "start this command once, it launches the others itself")
        _join(runtime)
        return False
    if grpo.num_processes == 1:
        return False
    if runtime.device == "cuda" and torch.cuda.device_count() < grpo.num_processes:
        raise ValueError(f"grpo.num_processes is {grpo.num_processes}, but this machine shows "
                         f"{torch.cuda.device_count()} GPUs, and each process needs one")
    for name, value in WITHOUT_MULTICAST.items():
        os.environ.setdefault(name, value)
    arguments = ["--config_file", str(CONFIGS[grpo.sharding]), "--num_processes", str(grpo.num_processes),
                 "--num_cpu_threads_per_process", str(runtime.threads), "--module", module, *sys.argv[1:]]
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        raise SystemExit(f"error: process {rank} of {grpo.num_processes} {how}; the others were stopped. Its own error "
                         "stands above. The same command resumes from the newest checkpoint") from None
    except SignalException as stopped:
        raise SystemExit(f"error: stopped by {stopped.sigval.name}, all processes with it") from None
    return True


def refuse_several() -> None:
    """Raises ValueError in a stage that trains in one process, if a launcher has started several."""
    if (started := _started()) > 1:
        raise ValueError(f"{started} processes were launched, but this stage trains in one; start it by itself")


def launched() -> bool:
    """Whether this process is one of those that a launcher has started."""
    return "LOCAL_RANK" in os.environ or _started() > 1


def _started() -> int:
    """How many processes the launcher of this one has started; one without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _join(runtime: RuntimeParams) -> None:
    """Takes this rank's device and meets the other ranks; from here on the rank ends when its launcher does."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    on_cpu = runtime.device == "cpu"
    if on_cpu:  # else it is cpu:RANK, which no checkpoint can be loaded to
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if not PartialState(cpu=on_cpu).is_main_process:
        logging.getLogger().setLevel(logging.WARNING)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)
