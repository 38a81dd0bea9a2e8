"""Do replicas hold the same bits? A checksum per tensor, compared now and then, and remembered at every step.

    replicas = Replicas(items, history=steps_between_checks)
    replicas.remember(step)                      # every measured step: checksums of the parameters stay on the device
    whole = replicas.check(step)                 # now and then: int64 (), which travels with the sample
    groups = groups_of(values)                   # ranks that hold the same
    drift = replicas.localise(group)             # a collective, only after all ranks have seen that they differ

The checksum reads the bits as 64-bit words and adds up rows of them (one pass at the speed of a sum), each row times an
odd key of its own, modulo 2^64. One changed bit always changes it: the change is 2^b times an odd number. Several
changes cancel with a probability of about 2^-64, unless they sit in the same row and add up to exactly nothing, as two
swapped words would.

Only the 64 bits of everything travel with a sample. When they differ, every rank has seen the same integers, so all
ranks then exchange the checksums of single tensors, and those of every step since the last comparison: from these
follow the tensors and the first step after which they differed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.sample_ids import mix64

ROW = 8192  # 64-bit words
BLOCK = 1 << 22  # elements copied at once where memory is not aligned; whole rows of every dtype
Groups = tuple[tuple[int, ...], ...]
Items = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Drift:
    """Where replicas differ: tensors by name, and the ranks' groups; since which step's update, if known."""

    names: tuple[str, ...]
    groups: Groups
    since: int | None


class Replicas:
    """Checksums of one rank's replica.

    Args:
        parameters: names and tensors that are remembered at every step.
        others: called at a comparison: names and tensors of everything else that is replicated then.
        history: steps that are remembered.
    """

    def __init__(self, parameters: Items, others: Callable[[], Items], history: int):
        self._parameters, self._others = list(parameters), others
        device = self._parameters[0][1].device if self._parameters else torch.device("cpu")
        self._history = torch.zeros(max(1, history), len(self._parameters), dtype=torch.int64, device=device)
        self._steps = [-1] * len(self._history)
        self._checked: tuple[int, list[str], Tensor] | None = None

    def remember(self, step: int) -> None:
        """Checksums of the parameters as optimizer step ``step`` finds them."""
        slot = step % len(self._steps)
        self._history[slot] = checksums([tensor for _, tensor in self._parameters], self._history.device)
        self._steps[slot] = step

    def check(self, step: int) -> Tensor:
        """int64 () checksum of everything that is replicated. :meth:`remember` was called for this step."""
        others = list(self._others())
        rest = checksums([tensor for _, tensor in others], self._history.device)
        values = torch.cat((self._history[step % len(self._steps)], rest))
        self._checked = (step, [name for name, _ in [*self._parameters, *others]], values)
        return combined(values)

    def weights(self) -> str:
        """Checksum of the parameters as they are now, as 16 hexadecimal digits. Waits for the device."""
        values = checksums([tensor for _, tensor in self._parameters], self._history.device)
        return f"{int(combined(values)) & 0xFFFFFFFFFFFFFFFF:016x}"

    def localise(self, group: dist.ProcessGroup) -> Drift | None:
        """The tensors that differ at the last :meth:`check`. A collective: every rank calls it at the same step."""
        assert self._checked is not None
        step, names, values = self._checked
        count = torch.tensor([len(values), -len(values)], dtype=torch.int32, device=values.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        if int(count[0]) != -int(count[1]):  # not even the same tensors
            return None
        tensors = _gather(values, group)  # (N, items)
        history = _gather(self._history.flatten(), group).view(len(tensors), *self._history.shape)
        apart = (tensors != tensors[0]).any(0).nonzero().flatten().tolist()
        different = (history != history[:1]).any(0).any(1)
        since = [s for s, bad in zip(self._steps, different.tolist(), strict=True) if bad and 0 <= s <= step]
        groups = groups_of(combined_rows(tensors[:, apart])) if apart else ()
        # the checksum that step s finds is what the update of step s - 1 has left
        return Drift(tuple(names[i] for i in apart), groups, min(since) - 1 if since else None)


def groups_of(values: Tensor) -> Groups:
    """(N,) integers to groups of ranks with equal values; the largest first, then by first rank."""
    found: dict[int, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        found.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks)))


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """(len(tensors),) int64 on ``device``, which nobody waits for."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([checksum(tensor).to(device, non_blocking=True) for tensor in tensors])


def checksum(tensor: Tensor) -> Tensor:
    """int64 () checksum of a tensor's bits, on its device; see the module docstring. Does not know dtype or shape."""
    flat = tensor.detach().reshape(-1)
    per_word = 8 // flat.element_size() if flat.element_size() < 8 else 1
    words, rest = flat.numel() // per_word, flat.numel() % per_word
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if words:
        whole = flat[: words * per_word]
        aligned = whole.storage_offset() * whole.element_size() % 8 == 0
        size = len(whole) if aligned else BLOCK
        for begin in range(0, len(whole), size):
            block = whole[begin : begin + size]
            # every block but the last is made of whole rows
            total += _rows((block if aligned else block.clone()).view(torch.int64), begin // per_word // ROW)
    if rest:
        last = torch.cat((flat[-rest:], flat.new_zeros(per_word - rest)))
        total += last.view(torch.int64)[0] * _key_list(1)[0]
    return total


def combined(values: Tensor) -> Tensor:
    """int64 () of (n,) checksums, in their order."""
    return (values * _keys(len(values), values.device)).sum()


def combined_rows(values: Tensor) -> Tensor:
    """int64 (N,) of (N, n) checksums."""
    return (values * _keys(values.shape[1], values.device)).sum(1)


def _rows(words: Tensor, first: int) -> Tensor:
    whole = len(words) // ROW
    keys = _keys(first + whole + 1, words.device)[first:]
    total = (words[: whole * ROW].view(whole, ROW).sum(1) * keys[:whole]).sum()
    return total + words[whole * ROW :].sum() * keys[whole]


def _keys(count: int, device: torch.device) -> Tensor:
    """int64 (count,) odd keys."""
    return _key_list(max(1024, 1 << (count - 1).bit_length()) if count else 1024).to(device)[:count]


@lru_cache(maxsize=32)
def _key_list(count: int) -> Tensor:
    return torch.from_numpy((mix64(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)).view(np.int64))


def _gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n,) int64 of every rank, (N, n) on the host; travels as int32."""
    ranks = dist.get_world_size(group)
    mine = values.contiguous().view(torch.int32)
    everybody = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everybody, mine, group=group)
    return torch.stack(everybody).cpu().view(torch.int64)
