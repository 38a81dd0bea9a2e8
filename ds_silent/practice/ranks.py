"""Run a plain function on N real gloo ranks on this machine's CPU.

    results = results_of(function, arguments, ranks=2)             # results[rank] is what the rank returned
    for message in on_ranks(work, arguments, ranks=4): ...         # in the order in which rank 0 sends them

``function(*arguments)`` and ``work(send, *arguments)`` are module-level functions that every rank calls inside one
process group; arguments, results and messages must be picklable. The ranks come from a fork server that has imported
torch and DeepSpeed once, so that a rank costs a fraction of a second; they meet through a file, never through a port,
and write what they print to a log that is shown when a rank breaks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ds_silent.extras import installed

SILENCE_SECONDS = 240.0  # longer than any training of the drill, and than DeepSpeed's first compilation
SETTLE_SECONDS = 0.5
LINES_SHOWN = 12

# with what a first step imports: torch's compiler, because optimizers ask whether they are compiled, and its back end,
# because DeepSpeed's Muon decorates a function with it; together seconds of CPU on each rank
PRELOADED = [
    "torch",
    "ds_silent.frameworks.deepspeed.attach_deepspeed",
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
]

Task = Callable[[Path, int], None]
"""Called on a rank with the folder of all ranks' notes, and the rank."""
_CONTEXT = multiprocessing.get_context("forkserver")


class RankBroke(Exception):
    """A rank raised, died or fell silent; the message is its last lines."""


def on_ranks(
    work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, silence: float = SILENCE_SECONDS
) -> Iterator[Any]:
    """Yield every message of rank 0 until all ranks have ended.

    Raises:
        RankBroke: one of them did not end well.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    with _started(partial(_report, work, arguments, sender), ranks, daemon=True) as (processes, folder):
        sender.close()  # the ranks hold the only ends: when they are gone, the pipe ends
        yield from _messages(receiver, processes, folder, silence)


def results_of(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int,
    timeout: float = 120.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Return what ``function(*arguments)``, which may start processes of its own, returns on each rank.

    Args:
        timeout: seconds for all ranks together; what is left then is killed.
        may_die: ranks that may break; their result is then None.

    Raises:
        RankBroke: another rank did, or the time was over.
    """
    with _started(partial(_keep, function, arguments), ranks, daemon=False) as (processes, folder):
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes):
            _refuse_broken(processes, folder, may_die, lines=None)
            if time.monotonic() > deadline:
                slow = next(rank for rank, process in enumerate(processes) if process.is_alive())
                raise RankBroke(_last_words(folder, slow, f"did not end within {timeout:.0f} s", None))
            time.sleep(0.02)
        _refuse_broken(processes, folder, may_die, lines=None)
        files = [folder / f"result_{rank}" for rank in range(ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]  # written by _keep


def _report(work: Callable[..., None], arguments: tuple[Any, ...], sender: Connection, folder: Path, rank: int) -> None:
    work(sender.send if rank == 0 else lambda message: None, *arguments)


def _keep(function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path, rank: int) -> None:
    (folder / f"result_{rank}").write_bytes(pickle.dumps(function(*arguments)))


# -- the ranks ---------------------------------------------------------------------------------------------------------


@contextmanager
def _started(task: Task, ranks: int, daemon: bool) -> Iterator[tuple[list[BaseProcess], Path]]:
    """Start a process for each rank, and make the folder of their notes; kill what is left at the end."""
    _CONTEXT.set_forkserver_preload([*PRELOADED, "ds_silent.practice.frozen"])  # what is there of it
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported, in the fork server
    with tempfile.TemporaryDirectory(prefix="ds_silent_ranks_") as directory:
        processes: list[BaseProcess] = [
            _CONTEXT.Process(target=_main, args=(task, rank, ranks, directory), daemon=daemon) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            yield processes, Path(directory)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _main(task: Task, rank: int, ranks: int, directory: str) -> None:
    log = os.open(f"{directory}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own default is a semaphore that os._exit would leave behind
    torch.set_num_threads(1)
    barrier, leave, status = dist.barrier, dist.destroy_process_group, 0  # as they are before a task patches them
    try:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
        if installed("deepspeed"):
            from ds_silent.frameworks.deepspeed.state import join

            join()
        # later than DeepSpeed joins: for all-reduces of inference it would map and clear 66 MB on each rank
        os.environ["LOCAL_SIZE"] = str(ranks)
        task(Path(directory), rank)
        barrier()
        leave()
    except BaseException:
        status = 1
        Path(directory, f"raised_{rank}").write_text(str(time.monotonic()))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a rank whose peer died must not wait for it in a destructor


def _end_with_parent() -> None:
    """End this rank when the process that has started it is gone, killed or not."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# -- what becomes of them ----------------------------------------------------------------------------------------------


def _messages(receiver: Connection, processes: list[BaseProcess], folder: Path, silence: float) -> Iterator[Any]:
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
        _refuse_broken(processes, folder)
        if time.monotonic() - heard > silence:
            raise RankBroke(_last_words(folder, 0, f"said nothing for {silence:.0f} s"))
    for process in processes:
        process.join(timeout=10.0)
    _refuse_broken(processes, folder)


def _refuse_broken(
    processes: list[BaseProcess], folder: Path, may_die: tuple[int, ...] = (), lines: int | None = LINES_SHOWN
) -> None:
    """Name the rank that began it: one that died without a word, else the first that raised; its peers only miss it.

    Raises:
        RankBroke: one has ended badly that may not.
    """

    def broken() -> list[int]:
        return [r for r, process in enumerate(processes) if process.exitcode not in (None, 0) and r not in may_die]

    def raised_at(rank: int) -> float:
        note = folder / f"raised_{rank}"
        return float(note.read_text() or "inf") if note.exists() else 0.0

    if broken():
        time.sleep(SETTLE_SECONDS)  # the culprit may be slower to end than those that missed it
        culprit = min(broken(), key=raised_at)
        raise RankBroke(_last_words(folder, culprit, f"ended with exit code {processes[culprit].exitcode}", lines))


def _last_words(folder: Path, rank: int, what: str, count: int | None = LINES_SHOWN) -> str:
    log = folder / f"rank_{rank}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    shown = lines if count is None else lines[-count:]
    told = "\n".join("".join(c if c.isprintable() else " " for c in line) for line in shown)
    return f"rank {rank} {what}\n{told}".rstrip()
