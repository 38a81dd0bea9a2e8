"""Thousands of ranks in one process: those that hold the same are acted once, by one thread for all of them.

results, received = act([range(1, 16_384), [0]], lambda part: localised(part))     # of each part, in bytes of one rank

Collectives of :mod:`torch.distributed` that the code under test calls are stood in for; ``SUM`` counts a part as often
as it has ranks, and ``get_rank`` says the first rank of a part, so who is to speak alone must be a part alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class _Crowd:
    def __init__(self, parts: Sequence[Sequence[int]]):
        self._parts = [list(part) for part in parts]
        self.size = sum(map(len, self._parts))
        assert sorted(rank for part in self._parts for rank in part) == list(range(self.size))
        self._barrier = threading.Barrier(len(parts), timeout=60)
        self._said: list[Any] = [None] * len(parts)
        self._mine = threading.local()
        self.received = [0] * len(parts)

    def enter(self, part: int) -> None:
        self._mine.part = part

    def abort(self) -> None:
        self._barrier.abort()

    def rank(self, *_: Any) -> int:
        return self._parts[self._mine.part][0]

    def _all(self, kind: str, mine: Tensor) -> list[Tensor]:
        """What every part has said; all say the same kind of thing, of the same size."""
        self._said[self._mine.part] = (kind, mine.clone())
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        assert len({(kind, tensor.shape, tensor.dtype) for kind, tensor in said}) == 1, said
        return [tensor for _, tensor in said]

    def all_reduce(self, tensor: Tensor, op: Any, group: Any, async_op: bool = False) -> _Done:
        said = self._all(f"all-reduce {op}", tensor)
        assert tensor.dtype in (torch.int32, torch.float32, torch.bfloat16)
        if op == dist.ReduceOp.SUM:
            tensor.copy_(torch.stack([own * len(part) for own, part in zip(said, self._parts, strict=True)]).sum(0))
        else:
            whole = torch.stack(said)
            tensor.copy_(whole.amax(0) if op == dist.ReduceOp.MAX else whole.amin(0))
        self.received[self._mine.part] += tensor.numel() * tensor.element_size()
        return _Done()

    def all_gather(self, everybody: list[Tensor], tensor: Tensor, group: Any, async_op: bool = False) -> _Done:
        for own, part in zip(self._all("all-gather", tensor), self._parts, strict=True):
            for rank in part:
                everybody[rank].copy_(own)
        self.received[self._mine.part] += self.size * tensor.numel() * tensor.element_size()
        return _Done()


class _Done:
    """Stand in for a collective that is over."""

    def wait(self) -> None:
        pass


def act(parts: Sequence[Sequence[int]], function: Callable[[int], T]) -> tuple[list[T], list[int]]:
    """Run ``function(part)`` for every part at once; their results, and the bytes that one rank of each received."""
    crowd = _Crowd(parts)
    results: list[Any] = [None] * len(parts)
    errors: list[BaseException] = []

    def run(part: int) -> None:
        crowd.enter(part)
        try:
            results[part] = function(part)
        except BaseException as error:
            errors.append(error)
            crowd.abort()

    stands_in = {
        "all_reduce": crowd.all_reduce,
        "all_gather": crowd.all_gather,
        "get_rank": crowd.rank,
        "get_world_size": lambda *_: crowd.size,
    }
    with mock.patch.multiple(dist, **stands_in):
        threads = [threading.Thread(target=run, args=(part,)) for part in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results, crowd.received
