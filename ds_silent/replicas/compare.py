"""Compare the ranks' replicas: which tensors differ, and which ranks hold the same, tensor by tensor.

    found = compare(items, bits, group)          # a collective: every rank calls it at the same step
    found.equal, found.apart                     # False, (3,): positions of the tensors that differ
    found.parts                                  # (((0, 1, 3), (2,)),): of each of them, ranks with the same bits
    found.outvoted                               # (2,): ranks outside of a tensor's majority

What travels are checksums (:mod:`ds_silent.kernels.checksums`), 64 bits of everything first. Whether all ranks have
the same is asked by one all-reduce of 16 bytes. When they differ, the same is asked of each tensor, and every rank's
checksums are gathered of those alone that differ: 8 bytes per rank and tensor, of as many as ``MIB`` MiB hold or
``FEWEST`` tensors. Where more differ, one checksum of all the others says which ranks hold the same of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.guard import CollectiveCall, unguarded
from ds_silent.distributed.parts import Parts, majority, outvoted, parts_of_numbers
from ds_silent.exchange.collectives import gather_on_host, same_on_all
from ds_silent.exchange.observation import Gathered, on_all
from ds_silent.kernels.checksums import Bits, Items, combined
from ds_silent.records import Event

MIB, FEWEST = 4, 32
"""4 MiB hold 65,536 tensors of 8 ranks, 8,192 of 64 and 512 of 1,024; never fewer than 32, which are 4 MiB of 16,384
ranks."""


@dataclass(frozen=True)
class Drift:
    """Where replicas differ: tensors by name, and the ranks' groups; since which step's update, if known.

    With steps that are not measured the update is one of those from ``earliest`` to ``since``; 0: the replicas were not
    seen equal before.
    """

    names: tuple[str, ...]
    groups: Parts
    since: int | None
    earliest: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Hold the result of a comparison of the replicas; the same on every rank.

    Where too many tensors differ to ask about each, the ``parts`` of the last ones are those of all of them together:
    who is in one part holds the same of each.

    Attributes:
        groups: ranks that hold the same of everything.
        apart: positions of the tensors that differ.
        parts: of each of them, which ranks hold the same bits.
        right: the checksum of the bits that more than half of the ranks hold; None without such a majority.
        comparable: False when ranks do not even hold the same number of tensors.
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
        """Ranks outside of a tensor's majority. Of whole replicas there may be none, and no rank is named without."""
        different = {id(parts): parts for parts in self.parts}.values()
        return tuple(sorted({rank for parts in different for rank in outvoted(parts)}))

    def drift(self, names: Sequence[str], since: int | None, earliest: int | None = None) -> Drift:
        """With the names of all tensors, and the steps whose update may have left the difference."""
        return Drift(tuple(names[place] for place in self.apart), self.groups, since, earliest)


def compare(items: Items, bits: Bits, group: dist.ProcessGroup) -> Comparison:
    """Compare the ranks' replicas. A collective of 32 bytes per rank; see the module where they differ."""
    return compare_checksums(bits(items), group)


def compare_checksums(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Comparison:
    """:func:`compare`, from the checksums of this rank's tensors: int64 (n,). A collective."""
    whole = combined(values)
    same, comparable = equal_on_all(
        torch.stack((whole, torch.full_like(whole, len(values)))), group, collective
    ).tolist()
    if not comparable:
        return Comparison(parts_of_numbers(gathered(whole, group, collective)[:, 0].numpy()), comparable=False)
    ranks = dist.get_world_size(group)
    if same:
        return Comparison((tuple(range(ranks)),))
    apart = (~equal_on_all(values, group, collective)).nonzero().flatten().tolist()
    room = max(FEWEST, MIB * (1 << 20) // (8 * ranks))
    single, rest = apart[:room], apart[room:]
    asked = torch.stack([whole, *values[single], *([combined(values[rest])] if rest else [])])
    columns = gathered(asked, group, collective).numpy().T
    groups, *parts = (parts_of_numbers(column) for column in columns)
    right = [_of_majority(own, column) for own, column in zip(parts, columns[1:], strict=True)]
    if rest:
        healthy = majority(parts[-1])
        right[-1:] = _told_by(healthy[0], values[rest], group, collective) if healthy else [None] * len(rest)
        parts[-1:] = [parts[-1]] * len(rest)
    return Comparison(groups, tuple(apart), tuple(parts), tuple(right))


def _of_majority(parts: Parts, column: npt.NDArray[np.int64]) -> int | None:
    healthy = majority(parts)
    return int(column[healthy[0]]) if healthy else None


def _told_by(rank: int, values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall) -> list[int | None]:
    """Checksums that one rank has. The others add zeros, and int32 carries the halves unchanged."""
    own = values if dist.get_rank(group) == rank else torch.zeros_like(values)
    halves = collective(lambda: own.contiguous().view(torch.int32).clone())  # run again, the buffer that was reduced
    collective(lambda: dist.all_reduce(halves, op=dist.ReduceOp.SUM, group=group))
    return list(halves.cpu().view(torch.int64).tolist())


def equal_on_all(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """Which of these int64 (n,) all ranks have alike: bool (n,) on the host. A collective of 16 bytes each."""
    return same_on_all(values.contiguous().view(torch.int32).view(-1, 2), group, collective).all(1)


def gathered(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """(n,) int64 of every rank, (N, n) on the host; travels as int32, which every backend has."""
    flat = values.contiguous().reshape(-1)
    return gather_on_host(flat.view(torch.int32), group, collective).view(torch.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Since when do replicas differ? Their checksums are remembered at every step and compared now and then: the first step
# after which they differed follows, or a few steps in which that one is.


class Replicas:
    """Checksums of one rank's replica.

    Args:
        parameters: names and tensors that are remembered.
        others: called at a comparison: names and tensors of everything else that is replicated then.
        history: how many steps are remembered.
    """

    def __init__(self, parameters: Items, others: Callable[[], Items], history: int):
        self._parameters, self._others = list(parameters), others
        self._bits, self._bits_of_others = Bits(), Bits()
        device = self._parameters[0][1].device if self._parameters else None
        self._history = torch.zeros(max(1, history), len(self._parameters), dtype=torch.int64, device=device)
        self._steps = [-1] * len(self._history)
        self._newest = -1  # slot
        self._differ_since: tuple[int, int] | None = None  # as found first: later, no equal checksum is remembered
        self._checked: tuple[int, list[str], Tensor] | None = None

    def remember(self, step: int) -> None:
        """Keep the checksums of the parameters as optimizer step ``step`` finds them."""
        self._newest = (self._newest + 1) % len(self._steps)
        self._history[self._newest] = self._bits(self._parameters)
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
        return f"{int(combined(self._bits(self._parameters))) & 0xFFFFFFFFFFFFFFFF:016x}"

    def localise(self, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Drift | None:
        """The tensors that differ at the last :meth:`check`; None where the ranks do not even have the same tensors.

        A collective: every rank calls it at the same step.
        """
        assert self._checked is not None
        step, names, values = self._checked
        found = compare_checksums(values, group, collective)
        if not found.comparable:
            return None
        different = ~equal_on_all(combined(self._history), group, collective)
        since = [s for s, bad in zip(self._steps, different.tolist(), strict=True) if bad and 0 <= s <= step]
        if not since:
            return found.drift(names, None)
        if self._differ_since is None:  # the checksum that step s finds is what the update of step s - 1 has left
            agreed = [s for s in self._steps if 0 <= s < min(since)]
            self._differ_since = min(since) - 1, max(agreed, default=0)
        return found.drift(names, *self._differ_since)

    def equal(self) -> None:
        """They are, at the last :meth:`check`."""
        self._differ_since = None


# ----------------------------------------------------------------------------------------------------------------------
# When the replicas are compared, and whether the weights are those of the checkpoint that was loaded. Whether anything
# is compared depends on the step, on checkpoints, which all ranks write together, and on what all ranks have read: a
# rank that alone was asked (a resume) asks the others first, with its next observation.


REMEMBERED = 10
"""Times between two comparisons of the replicas at which checksums are remembered, to find the first bad step by."""


class ReplicaChecks:
    """One rank's part.

    Attributes:
        due: compare at the next opportunity, whatever the interval says; the same on every rank.
        wanted: this rank wants all ranks to compare.
        after_updates: a response compares them there, and not the observations.
    """

    def __init__(
        self,
        config: SilentConsistencyConfig,
        replicated: tuple[Items, Callable[[], Items]],
        group: dist.ProcessGroup,
        after_updates: bool,
    ):
        parameters, others = replicated
        self.due = self.wanted = False
        self.after_updates = after_updates
        self._every, self._interval, self._group = config.integrity.replica_interval, config.interval, group
        compares = bool(self._every and parameters)
        self._replicas = Replicas(parameters, others, history=REMEMBERED + 2) if compares else None
        self._loaded: str | None = None  # checksum in the checkpoint that was loaded

    def take_due(self) -> bool:
        """Whether a comparison is due; it is not any more."""
        due, self.due = self.due, False
        return due

    def capture(self, step: int, scheduled: int) -> Tensor | None:
        """The replica's checksum where it is to be compared; remember it on the way there.

        Args:
            step: the framework's own, by which it is remembered.
            scheduled: the same on every rank.
        """
        if self._replicas is None or self.after_updates:
            return None
        due = self.take_due() or self._passed(scheduled, self._every)
        if due or self._passed(scheduled, -(-self._every // REMEMBERED)):
            self._replicas.remember(step)
        return self._replicas.check(step) if due else None

    def _passed(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` lies behind the last measured step, and not behind this one."""
        return step // every != (step - self._interval) // every

    def differ(self, gathered: Gathered) -> bool:
        """Whether the replicas were compared and hold different bits."""
        if self._replicas is None or gathered.hashes is None or not on_all(gathered.reduced.replica_seen):
            return False
        differ = bool((gathered.hashes[:, 0] != gathered.hashes[0, 0]).any())
        if not differ:
            self._replicas.equal()
        return differ

    def localise(self, collective: CollectiveCall) -> Drift | None:
        """The tensors that differ, where :meth:`differ`. A collective."""
        assert self._replicas is not None
        return self._replicas.localise(self._group, collective)

    def weights(self) -> str | None:
        """Checksum of the weights, for a checkpoint; None where they are not replicated or not compared."""
        return None if self._replicas is None else self._replicas.weights()

    def loaded(self, weights: str | None) -> None:
        """A checkpoint was loaded that held this checksum."""
        self._loaded = weights
        if self.after_updates:
            self.wanted = True  # this rank alone may have been asked: all hear of it first
        else:
            self.due = True

    def verify(self, step: int) -> Event | None:
        """Once after a resume: the weights that ``step`` starts from. The comparison speaks for the other ranks."""
        due, self._loaded = self._loaded, None
        if due is None or self._replicas is None:
            return None
        found = self._replicas.weights()
        if found == due:
            return None
        message = f"The weights that step {step} starts from ({found}) are not those of the checkpoint ({due})."
        remedy = "Load the checkpoint again, compare its files with their source, and do not go on from here."
        return Event(step, "initial-weights-mismatch", "error", (), "checkpoint", None, None, message, remedy)
