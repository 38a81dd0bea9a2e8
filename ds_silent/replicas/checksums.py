"""Do replicas hold the same bits? A checksum per tensor, compared now and then, and remembered at every step.

    replicas = Replicas(items, history=steps_between_checks)
    replicas.remember(step)                      # several times between checks: the checksums stay on the device
    whole = replicas.check(step)                 # now and then: int64 (), which travels with the sample
    groups = groups_of(values)                   # ranks that hold the same
    drift = replicas.localise(group)             # a collective, only after all ranks have seen that they differ

The checksum reads the bits as 64-bit words and adds up rows of them (one pass at the speed of a sum), each row times an
odd key of its own, modulo 2^64. One changed bit always changes it: the change is 2^b times an odd number. Several
changes cancel with a probability of about 2^-64, unless they sit in the same row and add up to exactly nothing, as two
swapped words would.

Only the 64 bits of everything travel with a sample. When they differ, every rank has seen the same integers, so all
ranks then exchange the checksums of single tensors, and those remembered since the last comparison: from these follow
the tensors, and the first step after which they differed, or a few steps in which that one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.exchange.collectives import gather_on_host
from ds_silent.exchange.row_ids import mix64
from ds_silent.ranks.together import Once, at_once

ROW = 8192  # 64-bit words
Groups = tuple[tuple[int, ...], ...]
Items = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Drift:
    """Where replicas differ: tensors by name, and the ranks' groups; since which step's update, if known.

    With steps that are not measured the update is one of those from ``earliest`` to ``since``.
    """

    names: tuple[str, ...]
    groups: Groups
    since: int | None
    earliest: int | None = None


@dataclass(frozen=True)
class Replica:
    """Tensors that may be written, so that this rank holds what the others hold.

    ``write_back``: to be called after writing, for what is no tensor but a number and is here as a copy.
    """

    items: Items
    write_back: Callable[[], None]


class Replicas:
    """Checksums of one rank's replica.

    Args:
        parameters: names and tensors that are remembered.
        others: called at a comparison: names and tensors of everything else that is replicated then.
        history: how many steps are remembered.
    """

    def __init__(self, parameters: Items, others: Callable[[], Items], history: int):
        self._parameters, self._others = list(parameters), others
        device = self._parameters[0][1].device if self._parameters else torch.device("cpu")
        self._checksums = Checksums([_bytes(tensor) for _, tensor in self._parameters], device)
        self._bits_of_others = Bits()
        self._history = torch.zeros(max(1, history), len(self._parameters), dtype=torch.int64, device=device)
        self._steps = [-1] * len(self._history)
        self._newest = -1  # slot
        self._checked: tuple[int, list[str], Tensor] | None = None

    def remember(self, step: int) -> None:
        """Checksums of the parameters as optimizer step ``step`` finds them."""
        self._newest = (self._newest + 1) % len(self._steps)
        self._history[self._newest] = self._now()
        self._steps[self._newest] = step

    def check(self, step: int) -> Tensor:
        """int64 () checksum of everything that is replicated. :meth:`remember` was called for this step."""
        others = list(self._others())
        rest = [self._bits_of_others(others).to(self._history.device)] if others else []
        values = torch.cat((self._history[self._newest], *rest))
        self._checked = (step, [name for name, _ in [*self._parameters, *others]], values)
        return combined(values)

    def weights(self) -> str:
        """Checksum of the parameters as they are now, as 16 hexadecimal digits. Waits for the device."""
        return f"{int(combined(self._now())) & 0xFFFFFFFFFFFFFFFF:016x}"

    def _now(self) -> Tensor:
        return self._checksums([tensor for _, tensor in self._parameters])

    def localise(self, group: dist.ProcessGroup, once: Once = at_once) -> Drift | None:
        """The tensors that differ at the last :meth:`check`. A collective: every rank calls it at the same step."""
        assert self._checked is not None
        step, names, values = self._checked
        own = torch.tensor([len(values), -len(values)], dtype=torch.int32, device=values.device)
        count = once(lambda: own)  # played again, the buffer that was reduced
        once(lambda: dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group))
        if int(count[0]) != -int(count[1]):  # not even the same tensors
            return None
        tensors = gathered(values, group, once)  # (N, items)
        history = gathered(self._history.flatten(), group, once).view(len(tensors), *self._history.shape)
        apart = (tensors != tensors[0]).any(0).nonzero().flatten().tolist()
        different = (history != history[:1]).any(0).any(1)
        since = [s for s, bad in zip(self._steps, different.tolist(), strict=True) if bad and 0 <= s <= step]
        groups = groups_of(combined(tensors[:, apart])) if apart else ()
        if not since:
            return Drift(tuple(names[i] for i in apart), groups, None)
        # the checksum that step s finds is what the update of step s - 1 has left
        agreed = [s for s in self._steps if 0 <= s < min(since)]
        return Drift(tuple(names[i] for i in apart), groups, min(since) - 1, max(agreed, default=min(since) - 1))


def groups_of(values: Tensor) -> Groups:
    """(N,) integers to groups of ranks with equal values; the largest first, then by first rank."""
    found: dict[int, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        found.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks)))


class Checksums:
    """(n,) int64 checksums of n tensors of fixed sizes, in two kernels per tensor and a few for all.

    Args:
        sizes: bytes of each tensor.
        device: where all of them are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self._places: list[tuple[int, int, int]] = []  # first row, whole rows, words of the last row
        owners: list[int] = []
        numbers: list[int] = []
        for index, size in enumerate(sizes):
            whole, rest = divmod(size // 8, ROW)
            self._places.append((len(owners), whole, rest))
            owners += [index] * (whole + (rest > 0))
            numbers += range(whole + (rest > 0))
        keys = keys_of(max(numbers, default=0) + 1)
        self._row_keys = keys[numbers].to(device)
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self._rows = torch.zeros(len(owners), dtype=torch.int64, device=device)
        self._last_words = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        self._last_key = int(keys[0])

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Of these tensors, in the order and of the sizes that were planned for; 0 for None. Nobody waits for it."""
        for index, ((first, whole, rest), tensor) in enumerate(zip(self._places, tensors, strict=True)):
            if tensor is None:
                self._rows[first : first + whole + (rest > 0)].zero_()
                self._last_words[index].zero_()
            else:
                self._read(tensor, index, first, whole, rest)
        sums = torch.zeros_like(self._last_words).index_add_(0, self._owners, self._rows * self._row_keys)
        return sums + self._last_words * self._last_key

    def _read(self, tensor: Tensor, index: int, first: int, whole: int, rest: int) -> None:
        flat = tensor.detach().reshape(-1)
        flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # 64-bit words need an aligned beginning
        in_words = (whole * ROW + rest) * 8 // flat.element_size()
        words = flat[:in_words].view(torch.int64)
        if whole:
            torch.sum(words[: whole * ROW].view(whole, ROW), 1, out=self._rows[first : first + whole])
        if rest:
            torch.sum(words[whole * ROW :], 0, out=self._rows[first + whole])
        if in_words < flat.numel():
            self._last_words[index : index + 1].view(flat.dtype)[: flat.numel() - in_words].copy_(flat[in_words:])


class Bits:
    """(n,) int64 checksums of a list of tensors, planned once for their sizes and devices."""

    def __init__(self) -> None:
        self._sizes: tuple[tuple[int, torch.device], ...] = ()
        self._plans: list[tuple[list[int], Checksums]] = []

    def __call__(self, items: Items) -> Tensor:
        """On the first tensor's device."""
        tensors = [tensor for _, tensor in items]
        sizes = tuple((tensor.numel() * tensor.element_size(), tensor.device) for tensor in tensors)
        if sizes != self._sizes:
            self._sizes, self._plans = sizes, []
            for device in dict.fromkeys(device for _, device in sizes):
                places = [place for place, (_, own) in enumerate(sizes) if own == device]
                self._plans.append((places, Checksums([sizes[place][0] for place in places], device)))
        values = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
        for places, checksums in self._plans:
            found = checksums([tensors[place] for place in places])
            values[torch.tensor(places, device=values.device)] = found.to(values.device)
        return values


class LayerChecksums:
    """(L,) int64 checksums of the layers of a gradient, from those of its tensors.

    Args:
        numels: elements of each tensor.
        layers: layer of each tensor, from 0.
        device: where the tensors are.
    """

    def __init__(self, numels: Sequence[int], layers: Sequence[int], device: torch.device):
        self._numels, self._device = list(numels), device
        self._layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self._keys = keys_of(len(layers)).to(device)
        self._count = max(layers, default=-1) + 1
        self._checksums: Checksums | None = None  # made when the tensors' dtype is known

    def __call__(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """An absent tensor counts as 0, which no gradient is likely to have."""
        if self._checksums is None:
            size = next((values.element_size() for values in tensors if values is not None), 4)
            self._checksums = Checksums([size * numel for numel in self._numels], self._device)
        layers = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        return layers.index_add_(0, self._layers, self._checksums(tensors) * self._keys)


def checksum(tensor: Tensor) -> Tensor:
    """int64 () checksum of a tensor's bits, on its device; see the module docstring. Does not know dtype or shape."""
    return Checksums([_bytes(tensor)], tensor.device)([tensor])[0]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def combined(values: Tensor) -> Tensor:
    """(..., n) checksums to (...) int64, in their order."""
    return (values * _device_keys(values.shape[-1], values.device)).sum(-1)


@lru_cache(maxsize=32)
def _device_keys(count: int, device: torch.device) -> Tensor:
    return keys_of(count).to(device)


def keys_of(count: int) -> Tensor:
    """int64 (count,) odd keys."""
    return torch.from_numpy((mix64(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)).view(np.int64))


def gathered(values: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """(n,) int64 of every rank, (N, n) on the host; travels as int32, which every backend has."""
    return gather_on_host(values.contiguous().view(torch.int32), group, once).view(torch.int64)
