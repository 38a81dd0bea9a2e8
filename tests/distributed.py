"""The one spawner: run a plain function on N real gloo ranks and get what each returned.

    results = run_distributed(function, world_size=2, arguments=(case,))      # results[rank]

Ranks meet through a file, never through a port. They come from a fork server that has imported torch and DeepSpeed
once, so a rank costs a fraction of a second instead of five. A rank that raises, dies or takes too long fails the test
with its own traceback, and every rank that is still there is ended.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "ds_silent.frameworks.deepspeed.attach"])


class RankFailed(AssertionError):
    """One rank raised, or died, or never came back."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...] = (),
    timeout: float = 120.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` ranks of one gloo process group.

    Args:
        function: a module-level function; its result and arguments are pickled by us, for us.
        timeout: seconds for all ranks together; what is left then is killed.
        may_die: ranks whose death is part of the test; their result is None.

    Returns:
        what each rank returned.
    """
    with tempfile.TemporaryDirectory(prefix="ds_silent_test_") as directory:
        folder = Path(directory)
        ranks = [
            _CONTEXT.Process(target=_rank_main, args=(function, arguments, rank, world_size, directory))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, folder, time.monotonic() + timeout, may_die)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        results: list[Any] = []
        for rank in range(world_size):
            result = folder / f"result_{rank}"
            results.append(pickle.loads(result.read_bytes()) if result.exists() else None)  # written by _rank_main
        return results


def _wait(ranks: list[BaseProcess], folder: Path, deadline: float, may_die: tuple[int, ...]) -> None:
    while any(process.is_alive() for process in ranks):
        for rank, process in enumerate(ranks):
            failure = folder / f"failure_{rank}"
            if failure.exists() and rank not in may_die:
                time.sleep(0.2)  # let it be written whole
                raise RankFailed(f"rank {rank}:\n{failure.read_text()}")
            if process.exitcode not in (None, 0) and rank not in may_die:
                raise RankFailed(f"rank {rank} ended with exit code {process.exitcode}")
        if time.monotonic() > deadline:
            raise RankFailed(f"ranks {[r for r, p in enumerate(ranks) if p.is_alive()]} did not end in time")
        time.sleep(0.02)
    for rank, process in enumerate(ranks):
        failure = folder / f"failure_{rank}"
        if rank not in may_die and (failure.exists() or process.exitcode != 0):
            text = failure.read_text() if failure.exists() else f"exit code {process.exitcode}"
            raise RankFailed(f"rank {rank}:\n{text}")


def _rank_main(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, world_size: int, directory: str
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    status = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        result = function(*arguments)
        Path(directory, f"result_{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        status = 1
        Path(directory, f"failure_{rank}").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a rank whose peer died must not wait for it in a destructor
