"""Wrap the collectives: names that differ between torch versions, copies to the host, and what arrived."""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.device import SideStream, pinned
from ds_silent.distributed.guard import CollectiveCall, unguarded
from ds_silent.exchange.observation import Gathered

# torch 2.13 renamed the flat all-gather and warns at the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_on_host(mine: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """Gather ``mine`` of every rank, stacked, on the host: for the rare exchange that waits. A collective."""
    own = mine.contiguous()
    everybody = collective(lambda: [torch.empty_like(own) for _ in range(dist.get_world_size(group))])
    collective(lambda: kept(dist.all_gather(everybody, own, group=group, async_op=True)).wait())
    return torch.stack(everybody).cpu()


def same_on_all(mine: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """Tell which of these int32 are the same on every rank: bool, of their shape, on the host. A collective that waits.

    One all-reduce of 8 bytes per number, whatever the number of ranks: the largest x and the largest ~x, which is
    -x - 1 and so the smallest x, without an overflow. They meet where all are equal.
    """
    own = mine.contiguous().reshape(-1)
    both = collective(lambda: torch.cat((own, ~own)))  # run again, the buffer that was reduced
    collective(lambda: kept(dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True)).wait())
    largest, smallest = both.cpu().chunk(2)
    return (largest == ~smallest).view(mine.shape)


def largest(mine: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest number of the ranks, of at most 31 bits. A collective that waits."""
    most = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)


_KEPT = 8  # more than the collectives of a step; gloo has 2 threads per group
_kept: deque[dist.Work] = deque()
_GLOO_ENDS = 0.2  # seconds at the end of the process


def kept(work: dist.Work) -> dist.Work:
    """Return ``work``, and let it live until some collectives later; the last ones as long as the process.

    A thread of gloo releases a collective's buffers some time after the collective is over, and needs Python's lock for
    those that Python knows. If Python is ending just then, the process ends with SIGABRT ("terminate called without an
    active exception"). While the collective lives, that thread releases none of them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))  # clearing the list as Python ends frees nothing
    _kept.append(work)
    if len(_kept) > _KEPT:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(_kept.popleft()))
    return work


@cache
def let_gloo_end_first() -> None:
    """Let gloo's threads release the script's own last collectives before Python ends: theirs are not ours to keep."""
    if sys.version_info < (3, 14):  # which ends no thread that waits for its lock
        atexit.register(time.sleep, _GLOO_ENDS)


# ----------------------------------------------------------------------------------------------------------------------
# A collective's result on its way to the host, beside the training.


class HostCopy:
    """Bring one collective's result to the host beside the training: no stream of the training waits for it."""

    def __init__(self, source: Tensor):
        self._source = source
        self._on_host = source.device.type == "cpu"
        self._work: dist.Work | None = None
        self._copying = False
        if not self._on_host:
            self._host = pinned(source)
            self._side = SideStream(source.device)

    def start(self, work: dist.Work | None) -> None:
        """Copy the result of ``work``, which is under way, as soon as it is there."""
        self._work, self._copying = work, False
        if not self._on_host:
            self._copy()
        elif work is not None:
            kept(work)

    def _copy(self) -> None:
        with self._side.working():
            if self._work is not None:
                self._work.wait()  # orders the side stream after the collective; the host goes on
            self._host.copy_(self._source, non_blocking=True)
        self._copying = True

    def arrives(self, seconds: float) -> bool:
        """Wait for the collective, for so long; return whether it is over. One that has failed is."""
        until = time.monotonic() + seconds
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def result(self) -> Tensor:
        """Return the fp32 values; the copy was started a step ago."""
        if not self._on_host:
            if not self._copying:  # starting it broke
                self._copy()
            self._side.wait()
            return self._host
        if self._work is not None:
            self._work.wait()
        return self._source


# ----------------------------------------------------------------------------------------------------------------------
# What came of one step: at once what all ranks act by, and the rest when somebody wants it.


@dataclass(frozen=True)
class Arrived:
    """Hold a step's observations.

    Attributes:
        known: what every rank has alike, of each rank; of very many the smallest and the largest of their values
            instead, as if there were two ranks (:mod:`ds_silent.exchange.rows`).
        make: everything, with the sketches or their sums. None where this rank knows no more than ``known``.
    """

    known: Gathered
    make: Callable[[], Gathered] | None

    @property
    def step(self) -> int:
        """Return the step of the observations."""
        return self.known.step

    @cached_property
    def all(self) -> Gathered:
        """Return everything; on the writing rank at any time, on others before the next observation is sent.

        Raises:
            LookupError: this rank does not have it.
        """
        if self.make is None:
            raise LookupError("the rows of all ranks are on the writing rank only")
        return self.make()
