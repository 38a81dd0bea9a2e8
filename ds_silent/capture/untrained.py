"""Trainable parameters that get a gradient which nothing reduces, or which no optimizer applies.

untrained = Untrained(framework, names, parameters)
missed = untrained.look(flags)       # a Missed, false where there is nothing to say; flags: requires_grad of each

Both follow from sets: the trainable parameters, those that the framework reduces, and those that optimizers hold. They
are compared when one of them has changed, and never else. A parameter counts from its first gradient on; what another
optimizer or another ``DistributedDataParallel`` of the process holds is none of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.records import EventKind, Severity

SHOWN_PARAMETERS = 3
LOOKS, ELEMENTS = 8, 64  # measured steps, and elements of each parameter, see Untrained._no_copies


@dataclass(frozen=True)
class Unlike:
    """What the ranks do not do alike, or all do wrongly, at a step: one entry per group of things."""

    key: str
    ranks: tuple[int, ...]  # the odd ones out; empty where all do the same
    where: str
    message: str
    remedy: str
    since: int
    kind: EventKind = "config-mismatch"
    severity: Severity = "error"
    effects: tuple[str, ...] = ()  # what follows of it, as of a finding


class Missed(NamedTuple):
    """Names of parameters, in the model's order."""

    unreduced: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()  # those that are in ``unreduced`` too left out
    ignored: tuple[str, ...] = ()  # unreduced, as the script has told its wrapper


NOTHING = Missed()
frozen_at_start = gc.get_freeze_count()  # counted once: it walks over all of them; a fork server counts anew


class Untrained:
    """One rank's trainable parameters, and who cares for them."""

    def __init__(self, framework: Framework | None, names: Sequence[str], parameters: Sequence[Tensor]):
        self._framework = framework
        self._names, self._parameters = names, parameters
        self._compared: Any = None
        self._unreduced: list[int] = []  # places of parameters, whether or not a gradient has come
        self._unheld: list[int] = []
        self._came: set[int] = set()
        self._masters: list[Tensor] = []  # what optimizers hold that the module has not
        self._first: Tensor | None = None  # some elements of the parameters that may be copies of those
        self._looks, self._written = 0, False  # at these elements; whether they have changed

    def look(self, flags: bytes) -> Missed:
        """Return what has had a gradient, between a step's reduction and its optimizer."""
        groups = None if self._framework is None else self._framework.parameter_groups()
        if groups is None:
            return NOTHING
        now = flags, tuple((id(group), len(group)) for group in groups)
        if now != self._compared:
            self._compare(flags, groups)
            self._compared = now
        suspects = {*self._unreduced, *self._unheld}
        if not suspects:
            return NOTHING
        self._came |= {place for place in suspects if self._parameters[place].grad is not None}
        told = set(getattr(self._framework and self._framework.wrapper, "parameters_to_ignore", ()))
        came = [place for place in self._unreduced if place in self._came]
        unreduced = tuple(self._names[place] for place in came if self._names[place] not in told)
        ignored = tuple(self._names[place] for place in came if self._names[place] in told)
        unheld = [place for place in self._unheld if place in self._came and place not in self._unreduced]
        unheld = self._no_copies(unheld)
        return Missed(unreduced, tuple(self._names[place] for place in unheld), ignored)

    def _no_copies(self, places: list[int]) -> list[int]:
        """Leave out the parameters that the script may write from masters: tensors of their shapes in its optimizers.

        Where none of them has changed after ``LOOKS`` measured steps they are none. Each of these looks waits for the
        device.
        """
        shapes = {master.shape for master in self._masters}
        plain = [place for place in places if type(self._parameters[place]) in (Tensor, torch.nn.Parameter)]
        copies = [place for place in plain if self._parameters[place].shape in shapes]
        if copies and not self._written and self._looks < LOOKS:
            values = [self._parameters[place].detach().reshape(-1)[:ELEMENTS].float() for place in copies]
            now, self._looks = torch.cat(values), self._looks + 1
            if self._first is None or len(self._first) != len(now):  # at the first look, and where others are meant
                self._first = now
            self._written = not torch.equal(self._first, now)
        stay = not self._written and self._looks == LOOKS
        return [place for place in places if stay or place not in copies]

    def _compare(self, flags: bytes, groups: list[list[Tensor]]) -> None:
        assert self._framework is not None
        trainable = [place for place, flag in enumerate(flags) if flag]
        reduced, held = self._framework.reduced_ids(), {id(parameter) for group in groups for parameter in group}
        unreduced = [] if reduced is None else [p for p in trainable if id(self._parameters[p]) not in reduced]
        unheld = [place for place in trainable if id(self._parameters[place]) not in held]
        own = set(map(id, self._parameters))
        self._masters = [parameter for group in groups for parameter in group if id(parameter) not in own]
        if unreduced or unheld:
            in_others, held_by_others = _others(self._framework.wrapper)
            unreduced = [place for place in unreduced if id(self._parameters[place]) not in in_others]
            if held_by_others is None:
                unheld = []
            else:
                unheld = [place for place in unheld if id(self._parameters[place]) not in held_by_others]
        self._unreduced, self._unheld = unreduced, unheld
        self._came &= {*unreduced, *unheld}


def _others(own: object) -> tuple[set[int], set[int] | None]:
    """Return ids of the parameters that others of the process reduce, and of those that any of its optimizers holds.

    What ``gc.freeze`` has set aside is not found: None where it has been called since this module was loaded.
    """
    reduced: set[int] = set()
    held: set[int] = set()
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, torch.optim.Optimizer):
            held |= {id(parameter) for group in getattr(one, "param_groups", ()) for parameter in group["params"]}
        elif issubclass(kind, DistributedDataParallel) and one is not own:
            with contextlib.suppress(AttributeError):  # one that Python is about to free has lost its attributes
                reduced |= {id(parameter) for parameter in one.parameters()}
    return reduced, None if gc.get_freeze_count() > frozen_at_start else held


def reported(missed: Missed, step: int) -> tuple[Unlike, ...]:
    """Word what all ranks have found, the same on each."""
    found = []
    if missed.unreduced:
        found.append(
            Unlike(
                key="untrained:unreduced",
                ranks=(),
                where=listed(missed.unreduced, SHOWN_PARAMETERS),
                message=f"{_these(missed.unreduced)} a gradient on all ranks that DistributedDataParallel does not "
                "reduce, because it needed none, or was not there, at its start: from this step on the replicas part.",
                remedy="Build DistributedDataParallel (and the observer) anew behind requires_grad_(True), or let "
                "every parameter that is ever trained need a gradient when it is built; go back to the last checkpoint "
                "before this step.",
                since=step,
                kind="unreduced-gradient",
                effects=("replica-drift", "integrity handed"),  # each rank clips by another norm then
            )
        )
    if missed.ignored:
        found.append(
            Unlike(
                key="untrained:ignored",
                ranks=(),
                where=listed(missed.ignored, SHOWN_PARAMETERS),
                message=f"{_these(missed.ignored)} a gradient on all ranks that DistributedDataParallel does not "
                "reduce, because it was told to ignore it (parameters_to_ignore): each rank trains it by its own rows.",
                remedy="Do nothing if each rank is to have its own, such as a part of a sharded embedding. Else reduce "
                "it, or take its name out of that list: the replicas part from this step on.",
                since=step,
                kind="unreduced-gradient",
                severity="info",
            )
        )
    if missed.unheld:
        found.append(
            Unlike(
                key="untrained:unheld",
                ranks=(),
                where=listed(missed.unheld, SHOWN_PARAMETERS),
                message=f"{_these(missed.unheld)} a gradient on all ranks, and no optimizer holds "
                f"{'it' if len(missed.unheld) == 1 else 'them'}: nothing trains what the script calls trainable.",
                remedy="Give it to an optimizer (add_param_group, or an optimizer that is built behind "
                "requires_grad_(True)); if it is to stay as it is, requires_grad_(False) saves its gradient.",
                since=step,
                kind="update-mismatch",
                severity="warning",
                effects=("integrity leftover", "integrity applied"),  # nobody clears it, and nobody applies it
            )
        )
    return tuple(found)


def _these(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} gets"
    return f"{names[0]} and {len(names) - 1} more parameter{'s' if len(names) > 2 else ''} get"
