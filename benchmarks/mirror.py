"""A process group of many ranks in one process: the others' part of each collective is a copy of one's own.

    mirror.register()
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=8)

What one rank of a training does can be timed so on one device, without a network: all is queued that a rank queues.
The observer rightly finds that all ranks have the same rows. Each rank checks another part of the aggregate; here all
parts are copies of the first, and their sum is not the whole. So any error of the reduction counts as rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from ds_silent.distributed import agreement
from ds_silent.maths import rounding_bound
from ds_silent.measure import reduction_check


def register() -> None:
    """Make the backend known to torch, and let the observer trust that the others say the same: nobody else comes."""
    agreement.store_of_all = lambda: None
    rounding_bound.rounding_tolerance = reduction_check.rounding_tolerance = lambda *_: math.inf
    dist.Backend.register_backend("mirror", lambda store, rank, size, timeout: Mirror(rank, size), devices=DEVICES)


DEVICES = ["cpu", "cuda"]
SUM = dist.ReduceOp.SUM


def _ended(result: Any) -> dist.Work:
    """Work that has been queued on the current stream, as far as the host can tell; waiting is for that stream."""
    first = result
    while isinstance(first, list) and first:
        first = first[0]
    devices = [first.device] if isinstance(first, Tensor) and first.is_cuda else None
    future: Future[Any] = Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(result)
    return _create_work_from_future(future)


class Mirror(dist.ProcessGroup):
    """The collectives that DistributedDataParallel, FSDP2 and the observer use."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""

    def getBackendName(self) -> str:  # noqa: N802
        return "mirror"

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        if opts is None or opts.reduceOp == SUM:
            for tensor in tensors:
                if tensor.is_floating_point():  # of whole numbers the observer sums texts, which one rank says
                    tensor.mul_(self._size)
        return _ended(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _ended(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _ended([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for copies, own in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.copy_(own)
        return _ended(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        mine = own.clone() if own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr() else own
        output.view(self._size, -1).copy_(mine.reshape(1, -1))
        return _ended(output)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, everything: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(everything.view(self._size, -1)[self._rank].view_as(output))
        if opts is None or opts.reduceOp == SUM:
            output.mul_(self._size)
        return _ended(output)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Tensor, own: Tensor, take: Sequence[int], give: Sequence[int], opts: Any = None
    ) -> dist.Work:
        part = own[: give[0]] if give else own.view(self._size, -1)[0]
        if len(part) and output.numel():
            output.view(-1, len(part)).copy_(part)
        return _ended(output)

    all_to_all_single = alltoall_base
