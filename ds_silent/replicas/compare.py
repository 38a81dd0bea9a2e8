"""Compares the ranks' replicas: which tensors differ, and which ranks hold the same, tensor by tensor.

    found = compare(items, bits, group)          # a collective: every rank calls it at the same step
    found.equal, found.apart                     # False, (3,): positions of the tensors that differ
    found.parts_at(3)                            # ((0, 1, 3), (2,)): ranks with the same bits of tensor 3
    found.outvoted                               # (2,): ranks outside of a tensor's majority
    found.drift(names, since=12)                 # the same, as a sentence needs it

What travels are checksums (:mod:`ds_silent.replicas.checksums`), 64 bits of everything first: when they differ, every
rank has seen the same integers, so all ranks then exchange the checksums of single tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.exchange.collectives import gather_on_host
from ds_silent.ranks.parts import Parts, outvoted, parts_of
from ds_silent.ranks.together import Once, at_once
from ds_silent.replicas.checksums import Bits, Items, combined


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

    ``groups``: ranks that hold the same of everything. ``apart``: positions of the tensors that differ; ``values``:
    (N, n) int64 checksums on the host, where some do. ``comparable``: False when ranks do not even hold the same number
    of tensors.
    """

    groups: Parts
    apart: tuple[int, ...] = ()
    values: Tensor | None = None
    comparable: bool = True

    @property
    def equal(self) -> bool:
        return len(self.groups) == 1

    def parts_at(self, place: int) -> Parts:
        """Ranks that hold the same bits of a tensor that differs."""
        assert self.values is not None
        return parts_of(self.values[:, place].tolist())

    @property
    def outvoted(self) -> tuple[int, ...]:
        """Ranks outside of a tensor's majority. Of whole replicas there may be none, and nobody is named without."""
        return tuple(sorted({rank for place in self.apart for rank in outvoted(self.parts_at(place))}))

    def drift(self, names: Sequence[str], since: int | None, earliest: int | None = None) -> Drift:
        """With the names of all tensors, and the steps whose update may have left the difference."""
        return Drift(tuple(names[place] for place in self.apart), self.groups, since, earliest)


def compare(items: Items, bits: Bits, group: dist.ProcessGroup) -> Comparison:
    """Compare the ranks' replicas. A collective of 16 bytes per rank, and of 8 per tensor where they differ."""
    values = bits(items)
    whole = gathered(torch.stack((combined(values), torch.full_like(values[0], len(items)))), group)
    if bool((whole[:, 1] != whole[0, 1]).any()):
        return Comparison(parts_of(combined(whole).tolist()), comparable=False)
    groups = parts_of(whole[:, 0].tolist())
    return Comparison(groups) if len(groups) == 1 else compare_tensors(values, group)


def compare_tensors(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Comparison:
    """By the checksums of this rank's tensors, as many on every rank: int64 (n,). A collective."""
    table = gathered(values, group, once)
    apart = (table != table[0]).any(0).nonzero().flatten().tolist()
    return Comparison(parts_of(combined(table).tolist()), tuple(apart), table)


def gathered(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """(n,) int64 of every rank, (N, n) on the host; travels as int32, which every backend has."""
    return gather_on_host(values.contiguous().view(torch.int32), group, once).view(torch.int64)
