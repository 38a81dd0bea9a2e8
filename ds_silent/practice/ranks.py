"""Starts the ranks of the drill on this machine's CPU and brings home what rank 0 reports.

    for message in on_ranks(work, arguments, ranks=4): ...     # in the order in which rank 0 sends them

``work(send, *arguments)`` is a module-level function that every rank calls inside one gloo process group; what it
sends must be picklable. The ranks come from a fork server that has imported torch and DeepSpeed once, meet through a
file, and write what they print to a log whose end is shown when a rank breaks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ds_silent.extras import installed

SILENCE_SECONDS = 240.0  # longer than any training of the drill, and than DeepSpeed's first compilation
SETTLE_SECONDS = 0.5
LINES_SHOWN = 12


class RankBroke(Exception):
    """A rank raised, died or fell silent; the message is its last lines."""


def on_ranks(
    work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, silence: float = SILENCE_SECONDS
) -> Iterator[Any]:
    """Yields every message of rank 0 until all ranks have ended.

    Raises:
        RankBroke: one of them did not end well.
    """
    context = multiprocessing.get_context("forkserver")
    # what is not installed is left out
    context.set_forkserver_preload(["torch", "ds_silent.frameworks.deepspeed.attach", work.__module__])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported, in the fork server
    with tempfile.TemporaryDirectory(prefix="ds_silent_drill_") as directory:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_main, args=(work, arguments, rank, ranks, directory, sender), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        sender.close()  # the ranks hold the only ends: when they are gone, the pipe ends
        try:
            yield from _messages(receiver, processes, Path(directory), silence)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _messages(receiver: Connection, processes: list[Any], folder: Path, silence: float) -> Iterator[Any]:
    heard = time.monotonic()
    while True:
        if receiver.poll(0.05):
            try:
                message = receiver.recv()
            except EOFError:
                break
            heard = time.monotonic()
            yield message
            continue
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(SETTLE_SECONDS)  # the culprit may be slower to end than those that missed it
            raise _broke(processes, folder)
        if time.monotonic() - heard > silence:
            raise RankBroke(_last_words(folder, 0, f"said nothing for {silence:.0f} s"))
    for process in processes:
        process.join(timeout=10.0)
    if any(process.exitcode != 0 for process in processes):
        raise _broke(processes, folder)


def _broke(processes: list[Any], folder: Path) -> RankBroke:
    """The rank that began it: one that died without a word, else the first that raised; its peers only miss it."""

    def raised_at(rank: int) -> float:
        note = folder / f"raised_{rank}"
        return float(note.read_text() or "inf") if note.exists() else 0.0

    broken = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
    culprit = min(broken, key=raised_at, default=0)
    return RankBroke(_last_words(folder, culprit, f"ended with exit code {processes[culprit].exitcode}"))


def _last_words(folder: Path, rank: int, what: str) -> str:
    log = folder / f"rank_{rank}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    told = "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines[-LINES_SHOWN:])
    return f"rank {rank} {what}\n{told}".rstrip()


def _main(
    work: Callable[..., None], arguments: tuple[Any, ...], rank: int, ranks: int, directory: str, sender: Connection
) -> None:
    log = os.open(f"{directory}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own default is a semaphore that os._exit would leave behind
    torch.set_num_threads(1)
    status = 0
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
        if installed("deepspeed"):
            from ds_silent.frameworks.deepspeed.groups import join

            join()
        work(sender.send if rank == 0 else _nowhere, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        status = 1
        Path(directory, f"raised_{rank}").write_text(str(time.monotonic()))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a rank whose peer died must not wait for it in a destructor


def _nowhere(message: Any) -> None:
    """Rank 0 alone reports."""
