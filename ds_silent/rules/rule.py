"""A rule checks one promise on one rank, and returns the breaches of it that this rank has found.

    class Rates(Rule):
        def connect(self, patches, safely): ...
        def breaches(self) -> tuple[Breach, ...]: ...

Every rank has the same rules. Their breaches travel as one hash with each observation; where it changes, the ranks ask
each other for the words, once (:mod:`ds_silent.capture.breaches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_silent.patches import Patches
from ds_silent.records import EventKind, Severity


@dataclass(frozen=True)
class Breach:
    """Describe a promise that this rank has found broken; two ranks that found the same have equal ``key``.

    Attributes:
        key: the same for the same fault on every rank and at every step; no number that changes.
        where: what is meant, for people: a parameter, a group, a field of the batch.
        message: one sentence or two, without the ranks: these are added where not all have it.
        since: the step at which it was found first.
        effects: kinds of findings that it brings about by itself, see :mod:`ds_silent.detectors.lifecycle`.
        alike_on_all: it is a fault only if every rank has found the same.
        unlike: what is compared; it is a fault only if ranks that found the same thing have other keys.
    """

    key: str
    kind: EventKind
    severity: Severity
    where: str
    message: str
    remedy: str
    since: int
    effects: tuple[str, ...] = ()
    alike_on_all: bool = False
    unlike: str = ""


class Rule:
    """Check one promise on this rank. What raises in a rule ends that rule on this rank, and nothing else."""

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Register the rule's own hooks; each calls ``safely(function, *arguments)``, which may return None."""

    def breaches(self) -> tuple[Breach, ...]:
        """Return what is broken by now, between the reduction and the optimizer of a measured step.

        It must not wait for a device. What is over is not returned any more; what a step cannot tell stays as it was.
        """
        raise NotImplementedError
