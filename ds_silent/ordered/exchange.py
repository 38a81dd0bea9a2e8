"""Exchange for an ordered reduction: the rank that answers for a piece gets it from every rank and adds it up.

    exchange = OrderedExchange(
        runs, group, device, memory_mb=64, micro_batches="contiguous", gathered=torch.float32, gram=True
    )
    gram = exchange.mean(own, result, gram=False)      # a collective

The gradients of all parameters, one after the other, are one long vector. Each rank answers for some runs of it. In a
round every rank sends every other the next piece of the other's runs (all-to-all), adds the N pieces it has got by the
tree, and divides by N. With ``gathered`` the means then travel to all ranks, else each stays with its owner: the volume
of a reduce-scatter, or of an all-reduce.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.exchange.exact import add_inner_products
from ds_silent.ordered.tree import sum_rows

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
CPU_MEMORY_MB = 8
"""On the CPU rounds are no larger than this: what stays in the cache is exchanged in half the time of 64 MiB."""

Run = tuple[int, int]
"""(first element, elements) of the long vector."""


class LongVector:
    """Tensors one after the other, where some may be absent: those are zeros, and what is written there is dropped.

    Args:
        offsets: of each tensor in the long vector, ascending from 0.
        tensors: contiguous, of any dtype and shape.
    """

    def __init__(self, offsets: list[int], tensors: list[Tensor | None]):
        self._offsets = offsets
        self._flat = [None if tensor is None else tensor.detach().view(-1) for tensor in tensors]

    def read(self, begin: int, end: int, out: Tensor) -> None:
        """Copy elements begin..end into ``out``."""
        for values, low, high, place in self._parts(begin, end):
            part = out[place : place + high - low]
            part.zero_() if values is None else part.copy_(values[low:high])

    def write(self, begin: int, values: Tensor) -> None:
        """Put ``values`` at ``begin`` and after, rounded to what is there."""
        for own, low, high, place in self._parts(begin, begin + values.numel()):
            if own is not None:
                own[low:high].copy_(values[place : place + high - low])

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Tensor | None, int, int, int]]:
        """(tensor, first and last of its elements, place behind ``begin``)."""
        index, at = bisect_right(self._offsets, begin) - 1, begin
        while at < end:
            following = self._offsets[index + 1] if index + 1 < len(self._offsets) else end
            stop = min(end, following)
            if at < stop:
                yield self._flat[index], at - self._offsets[index], stop - self._offsets[index], at - begin
            index, at = index + 1, max(at, stop)


class OrderedExchange:
    """See the module docstring. The buffers are allocated once.

    Args:
        runs: of each rank; together they are the whole long vector, once.
        memory_mb: bound of the buffers in MiB; less means more rounds, and the same bits.
        micro_batches: ``contiguous`` or ``interleaved``, see :mod:`ds_silent.ordered.tree`.
        gathered: dtype in which every rank gets every mean; None where each owner keeps its own.
        gram: whether :meth:`mean` will be asked for inner products.
    """

    def __init__(
        self,
        runs: list[list[Run]],
        group: dist.ProcessGroup,
        device: torch.device,
        memory_mb: int,
        micro_batches: str,
        gathered: torch.dtype | None,
        gram: bool,
    ):
        ranks = len(runs)
        self._group, self._micro_batches, self._device = group, micro_batches, device
        self._rank = dist.get_rank(group)
        longest = max(sum(numel for _, numel in own) for own in runs)
        buffers = 2 + gram
        if device.type == "cpu":
            memory_mb = min(memory_mb, CPU_MEMORY_MB)
        piece = max(1, min(memory_mb * (1 << 20) // (4 * ranks * buffers), longest))
        self._rounds = [[_cut(own, begin, begin + piece) for own in runs] for begin in range(0, longest, piece)]
        self._send = torch.zeros(ranks, piece, device=device)
        self._received = torch.zeros(ranks, piece, device=device)
        self._product = torch.zeros(ranks, piece, device=device) if gram else None
        self._mine = None if gathered is None else torch.zeros(piece, dtype=gathered, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        buffers = (self._send, self._received, self._product, self._mine)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def mean(self, own: LongVector, result: LongVector, gram: bool) -> Tensor | None:
        """The mean over the ranks of ``own`` into ``result``; every rank calls it, with the same ``gram``.

        ``result`` may lie where ``own`` does: what is written has been sent.

        Returns:
            with ``gram``, (N, N) fp32: this rank's part of the inner products of the ranks' long vectors.
        """
        ranks = len(self._send)
        inner = torch.zeros(ranks, ranks, device=self._device) if gram else None
        for pieces in self._rounds:
            for row, piece in zip(self._send, pieces, strict=True):
                at = 0
                for begin, numel in piece:
                    own.read(begin, begin + numel, row[at : at + numel])
                    at += numel
                row[at:].zero_()
            dist.all_to_all_single(self._received.view(-1), self._send.view(-1), group=self._group)
            if inner is not None:
                assert self._product is not None
                add_inner_products(inner, self._received, self._product)
            mean = sum_rows(self._received, self._micro_batches)
            if ranks & (ranks - 1):
                mean.div_(ranks)
            else:
                mean.mul_(1.0 / ranks)
            self._publish(mean, pieces, result)
        return inner

    def _publish(self, mean: Tensor, pieces: list[list[Run]], result: LongVector) -> None:
        if self._mine is None:
            _put(mean, pieces[self._rank], result)
            return
        self._mine.copy_(mean)
        everybody = self._send.view(-1).view(self._mine.dtype)[: len(pieces) * self._mine.numel()]  # it has been sent
        _all_gather(everybody, self._mine, group=self._group)
        for row, piece in zip(everybody.view(len(pieces), -1), pieces, strict=True):
            _put(row, piece, result)


def _put(values: Tensor, piece: list[Run], result: LongVector) -> None:
    at = 0
    for begin, numel in piece:
        result.write(begin, values[at : at + numel])
        at += numel


def _cut(runs: list[Run], begin: int, end: int) -> list[Run]:
    """What lies at begin..end of the runs put one after the other."""
    cut, at = [], 0
    for offset, numel in runs:
        low, high = max(begin - at, 0), min(end - at, numel)
        if low < high:
            cut.append((offset + low, high - low))
        at += numel
    return cut


def joined(runs: list[Run]) -> list[Run]:
    """The same elements in as few runs as their order allows."""
    result: list[Run] = []
    for offset, numel in runs:
        if result and sum(result[-1]) == offset:
            result[-1] = (result[-1][0], result[-1][1] + numel)
        elif numel:
            result.append((offset, numel))
    return result


def covers(runs: list[list[Run]], total: int) -> bool:
    """Whether all ranks' runs together are the whole vector, once."""
    return joined(sorted(run for own in runs for run in own)) == joined([(0, total)])


def gather_runs(own: list[Run], group: dist.ProcessGroup, device: torch.device) -> list[list[Run]]:
    """Every rank's runs; a collective of int32."""
    ranks = dist.get_world_size(group)
    count = torch.tensor([len(own)], dtype=torch.int32, device=device)
    counts = torch.zeros(ranks, dtype=torch.int32, device=device)
    _all_gather(counts, count, group=group)
    lengths = counts.tolist()
    mine = torch.zeros(max(1, *lengths), 4, dtype=torch.int32)
    for row, run in zip(mine, own, strict=False):
        row.copy_(torch.tensor([word for number in run for word in divmod(number, 1 << 30)], dtype=torch.int32))
    mine = mine.to(device)
    everybody = torch.zeros(ranks * mine.numel(), dtype=torch.int32, device=device)
    _all_gather(everybody, mine.view(-1), group=group)
    rows = everybody.view(ranks, -1, 4).tolist()
    return [
        [((a << 30) + b, (c << 30) + d) for a, b, c, d in words[:length]]
        for words, length in zip(rows, lengths, strict=True)
    ]
