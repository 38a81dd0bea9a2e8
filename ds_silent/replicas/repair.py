"""Make replicas equal again: by the bits that more than half of the ranks hold, or by the mean of all ranks.

    found = compare(items, bits, group)
    restore(items, found, group, device)                  # a majority's bits to the ranks outside of it
    still = compare(items, bits, group)                   # only this says that it is repaired

    average(tensors_that_differ, group, device)           # bucket by bucket
    averaging = Averaging(tensors, group, device).start()  # beside a forward and backward, finished later
    averaging.finish()

What arrives is checked before it is written: a majority's bits against the checksum that its own had, averages (PAFT,
openreview cPZepCZlFW) against those that the other ranks have received. What is corrupted under way is repeated, never
committed; a rank that dies under way leaves every tensor as it was or right. Only tensors that differ should be
averaged: the mean of N equal numbers may round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.parts import majority
from ds_silent.kernels.checksums import Items, checksum
from ds_silent.replicas.compare import Comparison, equal_on_all

BUCKET = 1 << 24  # elements that are averaged at once
ATTEMPTS = 3


def restore(items: Items, found: Comparison, group: dist.ProcessGroup, device: torch.device) -> int:
    """Give each tensor that differs the bits that more than half of the ranks hold. A collective.

    A tensor without such a majority is left alone, and so is one whose bits arrive damaged: ``compare`` tells.

    Args:
        device: of the group's buffers; the tensors may lie elsewhere, as step counts do.

    Returns:
        bytes that were broadcast.
    """
    return sum(
        _copy_bits(items[place][1], majority(parts), right, group, device)
        for place, parts, right in zip(found.apart, found.parts, found.right, strict=True)
        if right is not None
    )


def _copy_bits(
    tensor: Tensor, healthy: tuple[int, ...], expected: int, group: dist.ProcessGroup, device: torch.device
) -> int:
    """Broadcast from the first healthy rank; unhealthy ranks overwrite theirs if the checksum matches."""
    me, size = dist.get_rank(group), tensor.numel() * tensor.element_size()
    wire = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    if me == healthy[0]:
        wire.view(torch.uint8)[:size].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    dist.broadcast(wire, src=dist.get_global_rank(group, healthy[0]), group=group)
    if me not in healthy:
        arrived = wire.view(torch.uint8)[:size].view(tensor.dtype).view(tensor.shape)
        if int(checksum(arrived)) == expected:
            with torch.no_grad():
                tensor.copy_(arrived)
    return wire.numel() * 4


class Averaging:
    """The mean over the ranks of a few tensors: started, and finished later or at once. Every rank calls both.

    A floating-point tensor is averaged in fp32 over those ranks whose own is finite. Counts (integers, and single
    numbers such as an optimizer's step) take the largest, because a mean of counts is no count.

    Args:
        tensors: of this rank's replica, in the same order on every rank. Between start and finish they may be read.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device):
        self._group = group
        self._buckets = [_Bucket(bucket, group, device) for bucket in _buckets(tensors)]

    @property
    def bytes(self) -> int:
        """That go into the reductions."""
        return sum(bucket.wire.numel() * bucket.wire.element_size() for bucket in self._buckets)

    def start(self) -> Averaging:
        """Fill the buffers and start the reductions, in order."""
        for bucket in self._buckets:
            bucket.start()
        return self

    def drift(self, stride: int) -> Tensor:
        """fp32 (2,): squared distance of this rank from the mean, and elements, over every ``stride``-th element.

        Between the end of the reductions and :meth:`finish`.
        """
        distance = torch.zeros(2)
        for bucket in self._buckets:
            distance += bucket.drift(stride).cpu()
        return distance

    def finish(self, attempts: int = ATTEMPTS) -> int:
        """Wait, verify that every rank received the same bits, and write; repeat what was not.

        Returns:
            repetitions that were needed; ``attempts`` when some buckets never came out alike and were not written.
        """
        waiting, repeated = self._buckets, 0
        while waiting and repeated < attempts:
            alike = equal_on_all(torch.stack([bucket.received() for bucket in waiting]), self._group).tolist()
            for bucket, same in zip(waiting, alike, strict=True):
                if same:
                    bucket.commit()
            waiting = [bucket for bucket, same in zip(waiting, alike, strict=True) if not same]
            repeated += bool(waiting)
            if repeated < attempts:
                for bucket in waiting:
                    bucket.start()
        return repeated


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> tuple[int, int]:
    """The mean over the ranks, bucket by bucket, in one bucket's memory: bytes that were reduced, repetitions."""
    sent = repeated = 0
    for bucket in _buckets(tensors):
        averaging = Averaging(bucket, group, device).start()
        repeated += averaging.finish()
        sent += averaging.bytes
    return sent, repeated


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """In order, alike in how they are reduced, of at most ``BUCKET`` elements or one tensor."""
    buckets: dict[tuple[bool, bool], list[list[Tensor]]] = {}
    for tensor in tensors:
        floats = tensor.dtype.is_floating_point
        own = buckets.setdefault((floats, floats and tensor.ndim > 0), [[]])
        if own[-1] and sum(t.numel() for t in own[-1]) + tensor.numel() > BUCKET:
            own.append([])
        own[-1].append(tensor)
    return [bucket for own in buckets.values() for bucket in own if bucket]


class _Bucket:
    """Some tensors on their way through one all-reduce."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device):
        self._tensors, self._group = tensors, group
        floats = tensors[0].dtype.is_floating_point
        self._largest = tensors[0].ndim == 0 or not floats  # of counts
        numels = [tensor.numel() for tensor in tensors]
        # behind the tensors, for each the number of ranks whose values enter
        dtype = torch.float32 if floats else torch.int32
        self.wire = torch.zeros(sum(numels) + len(numels), dtype=dtype, device=device)
        *self._parts, self._entered = torch.split(self.wire, [*numels, len(numels)])
        self._work: dist.Work | None = None

    def start(self) -> None:
        for tensor, part in zip(self._tensors, self._parts, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        if not self._largest:
            # one pass, and finite only where every element is; a replica whose sum overflows has nothing to give
            finite = torch.isfinite(torch.stack([part.sum() for part in self._parts]))
            self._entered.copy_(finite)
            for part, usable in zip(self._parts, finite.tolist(), strict=True):
                if not usable:
                    part.zero_()
        operation = dist.ReduceOp.MAX if self._largest else dist.ReduceOp.SUM
        self._work = dist.all_reduce(self.wire, op=operation, group=self._group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def received(self) -> Tensor:
        """int64 () checksum of what came out."""
        self._wait()
        return checksum(self.wire)

    def drift(self, stride: int) -> Tensor:
        self._wait()
        total = torch.zeros(2, device=self.wire.device)
        for place, (tensor, part) in enumerate(zip(self._tensors, self._parts, strict=True)):
            if not self._largest:
                mean = part[::stride] / self._entered[place].clamp(min=1.0)
                own = tensor.detach().reshape(-1)[::stride].to(mean)
                total += torch.stack(((own - mean).square().sum(), mean.new_tensor(float(mean.numel()))))
        return total

    def commit(self) -> None:
        entered = self._entered.tolist()
        for tensor, part, ranks in zip(self._tensors, self._parts, entered, strict=True):
            if self._largest or ranks >= 1.0:  # else no rank holds finite numbers
                with torch.no_grad():
                    tensor.copy_((part if self._largest else part.div_(ranks)).view(tensor.shape))
