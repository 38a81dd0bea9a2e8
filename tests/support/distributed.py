"""The package's own spawner, as the tests call it: a plain function on N real gloo ranks, and what each returned.

results = run_distributed(function, world_size=2, arguments=(case,))      # results[rank]
results = run_distributed(each, 2, (function, {"a name": (case,)}))       # results[rank]["a name"]
results = run_on_kept_ranks(function, world_size=2, arguments=(case,))    # on ranks that stay for the file's next call

A rank that raises, dies or takes too long fails the test with its own traceback.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ds_silent.exchange import layout
from ds_silent.practice.ranks import PRELOADED, RankBroke, results_of

PRELOADED.append("pytest")  # ranks import the test's module for its function: 0.4 s of CPU on each
FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "megatron.core")


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...] = (),
    timeout: float = 120.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` ranks of one gloo process group."""
    # what the tests that were collected have imported, some ranks import too: 0.5 to 3 s of CPU on each
    PRELOADED.extend(name for name in FRAMEWORKS if name in sys.modules and name not in PRELOADED)
    return results_of(function, arguments, world_size, timeout, may_die)


class _Kept:
    """Ranks of one process group that wait for their next call."""

    def __init__(self, world_size: int) -> None:
        self._ours, theirs = map(list, zip(*(multiprocessing.Pipe() for _ in range(world_size)), strict=True))
        self._broke: list[BaseException] = []
        self._runs = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._runs.start()
        self._processes: list[Any] = []
        self._processes = self._replies(time.monotonic() + 240.0)  # an operator may be compiled meanwhile

    def _run(self, theirs: list[Connection]) -> None:
        try:
            results_of(_serve, (theirs,), len(theirs), timeout=float("inf"))
        except BaseException as error:
            self._broke.append(error)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        for ours in self._ours:
            ours.send((function, arguments))
        return self._replies(time.monotonic() + timeout)

    def _replies(self, deadline: float) -> list[Any]:
        replies: dict[int, Any] = {}
        while len(replies) < len(self._ours):
            missing = [rank for rank in range(len(self._ours)) if rank not in replies]
            if not self._runs.is_alive():
                late = "" if deadline < float("inf") else "they took too long, and the first that had not ended: "
                raise RankBroke(f"{late}{self._broke[0]}")
            if time.monotonic() > deadline:
                if not self._processes:
                    for ours in self._ours:  # those that start yet end at once
                        ours.close()
                    raise RankBroke("the ranks did not start")
                os.kill(self._processes[missing[0]], signal.SIGKILL)  # what it wrote is then in the error
                deadline = float("inf")
            for ready in wait([self._ours[rank] for rank in missing], timeout=0.1):
                rank = self._ours.index(ready)  # type: ignore[arg-type]
                replies[rank] = self._ours[rank].recv()
        return [replies[rank] for rank in range(len(self._ours))]

    def end(self) -> None:
        for ours in self._ours:
            ours.close()
        self._runs.join()


def _serve(given: list[Connection]) -> None:
    own, variables, folder = given[dist.get_rank()], dict(os.environ), os.getcwd()
    own.send(os.getpid())
    with suppress(EOFError):
        while True:
            function, arguments = own.recv()
            own.send(function(*arguments))
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(folder)


_kept: dict[tuple[str, int], _Kept] = {}  # by the file of tests, and how many


@atexit.register
def _end_all() -> None:
    while _kept:
        _kept.popitem()[1].end()


def run_on_kept_ranks(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...] = (), timeout: float = 120.0
) -> list[Any]:
    """As ``run_distributed``, on ranks that stay for the next call from the same file of tests.

    A start costs each rank some 0.5 s of CPU, and its first step as much again. What a function changes in its process
    it has to put back, but for the environment; who breaks is not kept.
    """
    key = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0], world_size
    if any(file != key[0] for file, _ in _kept):
        _end_all()
    ranks = _kept.pop(key, None) or _Kept(world_size)
    results = ranks.call(function, arguments, timeout)
    _kept[key] = ranks
    return results


def each(function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    """Call ``function`` for one case after the other: a start of the ranks costs more than a small training."""
    return {name: function(*arguments) for name, arguments in cases.items()}


def gather_limit_of(ranks: int) -> AbstractContextManager[object]:
    """With more than ``ranks`` ranks, observers that are attached inside do without everybody's sketches."""
    return patch.object(layout, "GATHER_LIMIT", ranks)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as it holds; fail when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not so after {seconds:.0f} s"
        time.sleep(0.005)
