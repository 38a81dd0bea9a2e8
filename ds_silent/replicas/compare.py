"""Compares the ranks' replicas: which tensors differ, and which ranks hold the same, tensor by tensor.

    found = compare(items, bits, group)          # a collective: every rank calls it at the same step
    found.equal, found.apart                     # False, (3,): positions of the tensors that differ
    found.parts                                  # (((0, 1, 3), (2,)),): of each of them, ranks with the same bits
    found.outvoted                               # (2,): ranks outside of a tensor's majority
    found.drift(names, since=12)                 # the same, as a sentence needs it

What travels are checksums (:mod:`ds_silent.kernels.checksums`), 64 bits of everything first. Whether all ranks have
the same is asked by one all-reduce (the largest and the smallest), 16 bytes whatever the number of ranks. When they
differ, every rank has seen so, and all ranks ask the same of each tensor. Every rank's checksums are gathered of those
tensors alone that differ: 8 bytes per rank and tensor, of as many as ``MIB`` MiB hold or ``FEWEST`` tensors. Where more
differ, one checksum of all the others says which ranks hold the same of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.parts import Parts, majority, outvoted, parts_of_numbers
from ds_silent.distributed.together import Once, at_once
from ds_silent.exchange.collectives import gather_on_host, same_on_all
from ds_silent.kernels.checksums import Bits, Items, combined

MIB, FEWEST = 4, 32
"""4 MiB hold 65,536 tensors of 8 ranks, 8,192 of 64 and 512 of 1,024; never fewer than 32, which are 4 MiB of 16,384
ranks."""


@dataclass(frozen=True)
class Drift:
    """Where replicas differ: tensors by name, and the ranks' groups; since which step's update, if known.

    With steps that are not measured the update is one of those from ``earliest`` to ``since``.
    """

    names: tuple[str, ...]
    groups: Parts
    since: int | None
    earliest: int | None = None


@dataclass(frozen=True)
class Comparison:
    """What a comparison of the replicas says; the same on every rank.

    ``groups``: ranks that hold the same of everything. Of the tensors that differ: ``apart``, their positions;
    ``parts``, which ranks hold the same bits; ``right``, the checksum of those bits that more than half of the ranks
    hold, None without such a majority. Where too many differ to ask about each, the parts of the last ones are those
    of all of them together: who is in one part holds the same of each. ``comparable``: False when ranks do not even
    hold the same number of tensors.
    """

    groups: Parts
    apart: tuple[int, ...] = ()
    parts: tuple[Parts, ...] = ()
    right: tuple[int | None, ...] = ()
    comparable: bool = True

    @property
    def equal(self) -> bool:
        return len(self.groups) == 1

    @property
    def outvoted(self) -> tuple[int, ...]:
        """Ranks outside of a tensor's majority. Of whole replicas there may be none, and nobody is named without."""
        different = {id(parts): parts for parts in self.parts}.values()
        return tuple(sorted({rank for parts in different for rank in outvoted(parts)}))

    def drift(self, names: Sequence[str], since: int | None, earliest: int | None = None) -> Drift:
        """With the names of all tensors, and the steps whose update may have left the difference."""
        return Drift(tuple(names[place] for place in self.apart), self.groups, since, earliest)


def compare(items: Items, bits: Bits, group: dist.ProcessGroup) -> Comparison:
    """Compare the ranks' replicas. A collective of 32 bytes per rank; see the module where they differ."""
    values = bits(items)
    whole = torch.stack((combined(values), torch.full_like(values[0], len(items))))
    same, comparable = equal_on_all(whole, group).tolist()
    if not comparable:
        return Comparison(parts_of_numbers(gathered(combined(whole), group)[:, 0].numpy()), comparable=False)
    if same:
        return Comparison((tuple(range(dist.get_world_size(group))),))
    return compare_tensors(values, group)


def compare_tensors(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Comparison:
    """By the checksums of this rank's tensors, as many on every rank: int64 (n,). A collective."""
    ranks = dist.get_world_size(group)
    apart = (~equal_on_all(values, group, once)).nonzero().flatten().tolist()
    room = max(FEWEST, MIB * (1 << 20) // (8 * ranks))
    single, rest = apart[:room], apart[room:]
    asked = torch.stack([combined(values), *values[single], *([combined(values[rest])] if rest else [])])
    table = gathered(asked, group, once)
    columns = [table[:, column].numpy() for column in range(table.shape[1])]
    groups, *parts = (parts_of_numbers(column) for column in columns)
    right = [_of_majority(own, column) for own, column in zip(parts, columns[1:], strict=True)]
    if rest:
        healthy = majority(parts[-1])
        right[-1:] = [None] * len(rest) if not healthy else _told_by(healthy[0], values[rest], group, once)
        parts[-1:] = [parts[-1]] * len(rest)
    return Comparison(groups, tuple(apart), tuple(parts), tuple(right))


def _of_majority(parts: Parts, column: npt.NDArray[np.int64]) -> int | None:
    healthy = majority(parts)
    return int(column[healthy[0]]) if healthy else None


def _told_by(rank: int, values: Tensor, group: dist.ProcessGroup, once: Once) -> list[int | None]:
    """Checksums that one rank has. The others add zeros, and int32 carries the halves unchanged."""
    own = values if dist.get_rank(group) == rank else torch.zeros_like(values)
    halves = once(lambda: own.contiguous().view(torch.int32).clone())  # played again, the buffer that was reduced
    once(lambda: dist.all_reduce(halves, op=dist.ReduceOp.SUM, group=group))
    return list(halves.cpu().view(torch.int64).tolist())


def equal_on_all(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """Which of these int64 (n,) all ranks have alike: bool (n,) on the host. A collective of 16 bytes each."""
    return same_on_all(values.contiguous().view(torch.int32).view(-1, 2), group, once).all(1)


def gathered(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """(n,) int64 of every rank, (N, n) on the host; travels as int32, which every backend has."""
    flat = values.contiguous().reshape(-1)
    return gather_on_host(flat.view(torch.int32), group, once).view(torch.int64)
