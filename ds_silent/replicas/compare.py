"""Compare the ranks' replicas: which tensors differ, and which ranks hold the same, tensor by tensor.

    found = compare(items, bits, group)          # a collective: every rank calls it at the same step
    found.equal, found.apart                     # False, (3,): positions of the tensors that differ
    found.parts                                  # (((0, 1, 3), (2,)),): for each, ranks with the same bits
    found.outvoted                               # (2,): ranks outside of a tensor's majority

Ranks exchange checksums (:mod:`ds_silent.kernels.checksums`), first one of 64 bits over everything: one all-reduce of
16 bytes tells whether all ranks agree. If not, each tensor is compared in the same way, and checksums are gathered
only of tensors that differ: 8 bytes per rank and tensor, for as many as ``MIB`` MiB hold, at least ``FEWEST``. If more
differ, one checksum of all the others tells which ranks hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.guard import CollectiveCall, unguarded
from ds_silent.distributed.parts import Parts, majority, outvoted, parts_of_numbers
from ds_silent.exchange.collectives import gather_on_host, same_on_all
from ds_silent.exchange.observation import PARAMETERS, Gathered, replica_checksums
from ds_silent.kernels.checksums import Bits, Items, combined
from ds_silent.records import Event
from ds_silent.replicas.own_parts import OwnBuffers, OwnStates

_LOOKS = 4  # measured steps
MIB, FEWEST = 4, 32
"""4 MiB hold 65,536 tensors with 8 ranks, 8,192 with 64, 512 with 1,024; 32 tensors take 4 MiB with 16,384 ranks."""


@dataclass(frozen=True)
class Drift:
    """Hold where replicas differ: tensors by name, the ranks' groups, and since which step's update, if known.

    If steps between were not measured, the update is one from ``earliest`` to ``since``; 0: the replicas were never
    seen equal. ``own``: what each rank holds of its own in health. Then nothing else is said, and that is compared no
    more. ``waits``: the next comparison knows whether it is a fault.
    """

    names: tuple[str, ...]
    groups: Parts
    since: int | None
    earliest: int | None = None
    own: tuple[str, ...] = ()
    waits: bool = False

    @property
    def says_nothing(self) -> bool:
        """Whether this comparison tells of no difference that is a fault."""
        return bool(self.own) or self.waits


@dataclass(frozen=True)
class Comparison:
    """Hold the result of a comparison of the replicas; the same on every rank.

    If too many tensors differ to ask about each, the last ones share their ``parts``: ranks in one part hold the same
    bits of all of them.
    """

    groups: Parts  # ranks whose replicas are equal
    apart: tuple[int, ...] = ()  # positions of the tensors that differ
    parts: tuple[Parts, ...] = ()  # for each of them, which ranks hold the same bits
    right: tuple[int | None, ...] = ()  # for each, the checksum that more than half of the ranks hold; None without
    comparable: bool = True  # False if ranks do not even hold the same number of tensors

    @property
    def equal(self) -> bool:
        return len(self.groups) == 1

    @property
    def outvoted(self) -> tuple[int, ...]:
        """Return the ranks outside a tensor's majority; whole replicas need not have one."""
        different = {id(parts): parts for parts in self.parts}.values()
        return tuple(sorted({rank for parts in different for rank in outvoted(parts)}))

    def drift(self, names: Sequence[str], since: int | None, earliest: int | None = None) -> Drift:
        """Make the drift, with all tensors' names and the steps whose update may be at fault."""
        return Drift(tuple(names[place] for place in self.apart), self.groups, since, earliest)


def batch_statistics_of(module: nn.Module) -> list[Tensor]:
    """Return the running statistics of normalisations: each rank's own in health, unless they are synchronised."""
    return [
        buffer
        for inner in module.modules()
        if isinstance(inner, _NormBase) and not isinstance(inner, nn.SyncBatchNorm)
        for buffer in inner.buffers(recurse=False)
    ]


def compare(items: Items, bits: Bits, group: dist.ProcessGroup) -> Comparison:
    """Compare the ranks' replicas. A collective of 32 bytes per rank; more if they differ, see the module."""
    return compare_checksums(bits(items), group)


def compare_checksums(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Comparison:
    """Compare by the checksums of this rank's tensors, int64 (n,). A collective."""
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
    right = [
        int(column[healthy[0]]) if (healthy := majority(own)) else None
        for own, column in zip(parts, columns[1:], strict=True)
    ]
    if rest:
        healthy = majority(parts[-1])
        right[-1:] = _told_by(healthy[0], values[rest], group, collective) if healthy else [None] * len(rest)
        parts[-1:] = [parts[-1]] * len(rest)
    return Comparison(groups, tuple(apart), tuple(parts), tuple(right))


def _told_by(rank: int, values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall) -> list[int | None]:
    """Return one rank's checksums. The others add zeros; int32 carries the halves unchanged."""
    own = values if dist.get_rank(group) == rank else torch.zeros_like(values)
    halves = collective(lambda: own.contiguous().view(torch.int32).clone())  # a rerun needs unreduced values
    collective(lambda: dist.all_reduce(halves, op=dist.ReduceOp.SUM, group=group))
    return list(halves.cpu().view(torch.int64).tolist())


def equal_on_all(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """Return which of the int64 (n,) all ranks share: bool (n,) on the host. A collective of 16 bytes each."""
    return same_on_all(values.contiguous().view(torch.int32).view(-1, 2), group, collective).all(1)


def gathered(values: Tensor, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Tensor:
    """Gather every rank's int64 (n,) as (N, n) on the host; sent as int32, which every backend has."""
    flat = values.contiguous().reshape(-1)
    return gather_on_host(flat.view(torch.int32), group, collective).view(torch.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Since when do replicas differ? Checksums are remembered at every step and compared now and then. This gives the first
# step after which they differed, or a few steps around it.


class Replicas:
    """Keep checksums of one rank's replica.

    Args:
        parameters: names and tensors that are remembered.
        others: called at a comparison; gives names and tensors of all else that is replicated.
        history: how many steps are remembered.
    """

    def __init__(self, parameters: Items, others: Callable[[], Items], history: int):
        self._parameters, self._others = list(parameters), others
        device = self._parameters[0][1].device if self._parameters else torch.device("cpu")
        self._bits, self._bits_of_others = Bits(device), Bits(device)
        self._history = torch.zeros(max(1, history), len(self._parameters), dtype=torch.int64, device=device)
        self._steps = [-1] * len(self._history)
        self._newest = -1  # slot
        self._differ_since: tuple[int, int] | None = None  # as first found: later no equal checksum is left
        self._checked: tuple[int, list[str], Tensor] | None = None
        self._buffers, self._states = OwnBuffers(device), OwnStates()

    def find_moving(self) -> bool:
        """Look which buffers have moved since the last look; return whether a first one has."""
        return self._buffers.look(self._others())

    def remember(self, step: int) -> None:
        """Keep the parameters' checksums as optimizer step ``step`` finds them."""
        self._steps = [-1 if old >= step else old for old in self._steps]  # the training may have gone back
        self._newest = (self._newest + 1) % len(self._steps)
        self._history[self._newest] = self._bits(self._parameters)
        self._steps[self._newest] = step

    def check(self, step: int, whole: bool = True) -> Tensor:
        """Return the int64 () checksum of all that is replicated; call :meth:`remember` first.

        ``whole``: else that of the parameters, which has been made.
        """
        others = self._states.compared(self._buffers.compared(self._others())) if whole else []
        rest = [self._bits_of_others(others)] if others else []
        values = torch.cat((self._history[self._newest], *rest))
        self._checked = (step, [name for name, _ in [*self._parameters, *others]], values)
        return combined(values)

    def weights(self) -> str:
        """Return the parameters' present checksum, 16 hexadecimal digits. Waits for the device."""
        return f"{int(combined(self._bits(self._parameters))) & 0xFFFFFFFFFFFFFFFF:016x}"

    def localise(self, group: dist.ProcessGroup, collective: CollectiveCall = unguarded) -> Drift | None:
        """Find the tensors that differ at the last :meth:`check`; None if ranks hold unlike numbers of tensors.

        A collective: every rank calls it at the same step.
        """
        assert self._checked is not None
        step, names, values = self._checked
        found = compare_checksums(values, group, collective)
        agree = partial(equal_on_all, group=group, collective=collective)
        # weights differ, of which all ranks have as many
        weights = found.comparable and min(found.apart, default=0) < len(self._parameters)
        self._states.waits &= not weights
        states = None if weights else self._states.apart(names, values, agree)
        if states is not None:
            return Drift((), found.groups, None, own=states, waits=not states)
        if not found.comparable:
            return None
        apart = [names[place] for place in found.apart]
        own = self._buffers.leave_out(apart, values[list(found.apart)], agree)
        if own:  # whatever else differs the next comparison finds
            return Drift((), found.groups, None, own=own)
        different = ~equal_on_all(combined(self._history), group, collective)
        since = [s for s, bad in zip(self._steps, different.tolist(), strict=True) if bad and 0 <= s <= step]
        if not since:
            return found.drift(names, None)
        if self._differ_since is None:  # step s finds what the update of step s - 1 left
            agreed = [s for s in self._steps if 0 <= s < min(since)]
            self._differ_since = min(since) - 1, max(agreed, default=0)
        return found.drift(names, *self._differ_since)

    def equal(self) -> None:
        """Note that replicas agree: forget the old difference."""
        self._differ_since, self._states.waits = None, False


# ----------------------------------------------------------------------------------------------------------------------
# When are replicas compared, and are the weights those of the loaded checkpoint? A comparison depends on the step, on
# checkpoints, which all ranks write together, and on what all ranks have read: a rank that alone was asked (by a
# resume) asks the others first, with its next observation.


REMEMBERED = 10
"""How often the parameters' checksums are made and compared between two comparisons of all that is replicated."""


class ReplicaChecksum(NamedTuple):
    """Say of what a checksum is: see ``replica_seen`` in :mod:`ds_silent.exchange.observation`."""

    value: Tensor
    seen: float


class ReplicaChecks:
    """Decide when this rank compares its replica."""

    def __init__(
        self,
        config: SilentConsistencyConfig,
        replicated: tuple[Items, Callable[[], Items]],
        group: dist.ProcessGroup,
        after_updates: bool,
        part: Callable[[], bool],
    ):
        """``part``: tells whether replicas part by design now."""
        parameters, others = replicated
        self._part = part
        self.due = False  # compare next time, whatever the interval says; the same on every rank
        self.wanted = False  # this rank wants all to compare
        self.after_updates = after_updates  # a response compares then; observations do not
        self._every, self._interval, self._group = config.integrity.replica_interval, config.interval, group
        compares = bool(self._every and parameters)
        self._replicas = Replicas(parameters, others, history=REMEMBERED + 2) if compares else None
        self._differ = False  # at the last comparison
        self._before: int | None = None  # the newest measured step
        self._looks = _LOOKS  # for buffers that move, before the first comparison that is due by itself
        self._loaded: str | None = None  # checksum in the loaded checkpoint

    def take_due(self) -> bool:
        """Tell whether a comparison is due, and clear it."""
        due, self.due = self.due, False
        return due

    def capture(self, step: int, scheduled: int) -> ReplicaChecksum | None:
        """Return the replica's checksum if a comparison is due, and the parameters' wherever theirs is remembered.

        The latter costs nothing more, and tells of a drift in a training that ends before the next comparison. Where
        the whole replicas differ, the parameters alone cannot say that this is over.

        Args:
            step: the framework's own, as the key.
            scheduled: the step that ranks agree on.
        """
        if self._replicas is None or self.after_updates or self._part():
            return None
        before = scheduled - self._interval
        if self._before is not None and self._before < scheduled:  # else it is the first, or has gone back
            before = min(before, self._before)  # steps that nothing was measured of may lie between
        self._before = scheduled
        if self._looks:
            self._looks -= 1
            self.wanted |= self._replicas.find_moving()
        due = self.take_due() or _passed(before, scheduled, self._every)
        if not due and not _passed(before, scheduled, -(-self._every // REMEMBERED)):
            return None
        self._replicas.remember(step)
        if not due and (self._differ or self._every < REMEMBERED):  # the next comparison is near
            return None
        return ReplicaChecksum(self._replicas.check(step, whole=due), 1.0 if due else PARAMETERS)

    def differ(self, gathered: Gathered) -> bool:
        """Tell whether replicas were compared and differ."""
        if self._replicas is None or (checksums := replica_checksums(gathered)) is None:
            return False
        self._differ = bool((checksums != checksums[0]).any())
        if not self._differ:
            self._replicas.equal()
        return self._differ

    def localise(self, collective: CollectiveCall) -> Drift | None:
        """Find the tensors that differ, after :meth:`differ`. A collective."""
        assert self._replicas is not None
        drift = self._replicas.localise(self._group, collective)
        if drift is not None and drift.says_nothing:  # compare once more, without what is a rank's own
            self._differ, self.due = False, True
        return drift

    def weights(self) -> str | None:
        """Return the weights' checksum, for a checkpoint; None if they are not replicated or compared."""
        return None if self._replicas is None else self._replicas.weights()

    def loaded(self, weights: str | None) -> None:
        """Note the checksum in the loaded checkpoint."""
        self._loaded = weights
        if self.after_updates:
            self.wanted = True  # only this rank may have been asked: tell all first
        else:
            self.due = True

    def verify(self, step: int) -> Event | None:
        """Check, once after a resume, the weights that ``step`` starts from; the comparison covers other ranks."""
        due, self._loaded = self._loaded, None
        if due is None or self._replicas is None:
            return None
        found = self._replicas.weights()
        if found == due:
            return None
        message = f"The weights that step {step} starts from ({found}) are not those of the checkpoint ({due})."
        remedy = "Load the checkpoint again, compare its files with their source, and do not go on from here."
        return Event(step, "initial-weights-mismatch", "error", (), "checkpoint", None, None, message, remedy)


def _passed(before: int, step: int, every: int) -> bool:
    """Tell whether a multiple of ``every`` lies after one step, up to another."""
    return step // every != before // every
