"""What every rank's code must do alike while it trains: hyper-parameters and what optimizers hold, their step counters,
evaluation mode, which parameters train, the settings of modules, autocast.

    check = SettingsCheck(LocalSettings(module, optimizers, framework), words)
    found = check.agree(arrived, group, device, together)   # on all ranks alike, once per gathered observation

Each is a few hundred numbers on the host, hashed to 24 bits (fp32 carries them exactly; two settings look alike by
chance once in 17 million) and sent with the observation; the hash is made anew only when something has changed. Where
the ranks' hashes differ, all ranks have read so and ask each other once, by the preflight's comparison, what it is that
differs. A collective runs only where the set of ranks that differ is another one than before, and ``MOST_QUESTIONS``
times at most.

The random numbers of a rank's first training forward are compared too: where they are the same on all ranks, all use
the same dropout masks on different rows. That is how many scripts seed, and no fault: a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.mismatch_text import GROUPS_OF_KINDS, OBJECTIVE, mismatches_of, same_draws, unlike
from ds_silent.capture.same_objective import SameObjective
from ds_silent.capture.untrained import NOTHING, Missed, Unlike, reported
from ds_silent.distributed.parts import Parts, parts_of
from ds_silent.distributed.together import Together
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.observation import Code, Gathered
from ds_silent.preflight.comparison import PreflightOutcome, compare
from ds_silent.preflight.messages import events_of
from ds_silent.records import Event
from ds_silent.text import Words

KINDS = tuple(kind for kind in GROUPS_OF_KINDS if kind != OBJECTIVE)
"""Fields of :class:`ds_silent.exchange.observation.Code`: 0 is not known."""
_OF_PREFLIGHT = {"optimizer": ("optimizer", "config"), "counters": ("optimizer", "config"), "settings": ("parameters",)}
"""Groups of the preflight in which a thing may have been told; else that of the same name."""
MOST_QUESTIONS = 64  # per run
_EXTREMES: Parts = ((0,), (1,))  # of many ranks all know only the smallest and the largest hash

_News = tuple[dict[str, set[Parts]], dict[str, Parts], int]


class SettingsCheck:
    """What all ranks know of each other's settings.

    Args:
        local: this rank's.
        words: the framework's, for a note.

    Attributes:
        differing: what differs between the ranks at the step that was read last, the same on every rank.
    """

    def __init__(self, local: LocalSettings, words: Words):
        self.local, self._words = local, words
        self._same_objective = SameObjective()
        self._missed = NOTHING  # of all ranks, as it was reported last
        self.differing: Mapping[str, Parts] = {}
        self._asked: dict[str, Parts] = {}
        self._answer: tuple[Unlike, ...] = ()
        self._known: dict[str, set[Parts]] = {}  # reported before step 1
        self._questions = 0
        self._noted = False

    def told_before(self, outcome: PreflightOutcome) -> None:
        """What the preflight has told is not told again while the same ranks differ."""
        for kind, group in GROUPS_OF_KINDS.items():
            groups = _OF_PREFLIGHT.get(group, (group,))
            parts = {one.parts for one in outcome.wrong if one.item.group in groups}
            self._known[kind] = parts | {_EXTREMES} if parts else parts
        if any(one.item.group == "optimizer" for one in outcome.wrong):
            self.local.ignore_untrained()

    def agree(
        self, arrived: Arrived, group: dist.ProcessGroup, device: torch.device, together: Together
    ) -> tuple[Unlike, ...]:
        """What the ranks do not do alike. Every rank calls it with the same observations, at the same step: where the
        ranks that differ are others than before, it is a collective that waits."""
        self._same_objective = together.decided(partial(self._same_objective.of, arrived.known))
        self.differing = together.decided(lambda: _differences(arrived.known, self._same_objective))
        news = together.decided(lambda: self._news(self.differing))
        if news is not None:
            self._known, self._asked, self._questions = news
            self._answer = unlike(_named(self._asked, arrived), arrived.step)
            if self._asked and self._questions <= MOST_QUESTIONS:
                asked = OBJECTIVE in self._asked
                items = together.alone(self.local.items, arrived.step, asked, self._same_objective.structural) or []
                outcome = compare(items, group, device, together.once)
                found = events_of(outcome, arrived.step)
                told = mismatches_of(found, arrived.known, outcome.world_size)
                self._answer = told or self._answer
        self._missed = self._missed_by_all(arrived)
        return *self._answer, *reported(self._missed, arrived.step)

    def _missed_by_all(self, arrived: Arrived) -> Missed:
        """What is the same on all ranks; what differs is asked."""
        values = arrived.known.code.trainable
        alike = bool((values == values[0]).all()) and bool((values != 0).all())
        return self.local.missed_at(arrived.step) if alike else NOTHING

    def _news(self, parts: Mapping[str, Parts]) -> _News | None:
        """What is known, asked, and how often, where other ranks differ than before; the same on every rank."""
        known = {kind: self._known.get(kind, set()) & {parts.get(kind, ())} for kind in GROUPS_OF_KINDS}
        new = {kind: found for kind, found in parts.items() if found not in known[kind]}
        if new == self._asked:
            self._known = known
            return None
        return known, new, self._questions + bool(new)

    def unasked(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """The same without asking, where the ranks do not come together any more; nothing where it is told already."""
        parts = _differences(arrived.known, self._same_objective.of(arrived.known))
        new = {kind: found for kind, found in parts.items() if found not in self._known.get(kind, ())}
        missed = self._missed_by_all(arrived)
        return (
            *(() if new == self._asked else unlike(_named(new, arrived), arrived.step)),
            *(() if missed == self._missed else reported(missed, arrived.step)),
        )

    def note(self, known: Gathered, ranks: int) -> Event | None:
        """Once: that the first forward drew the same random numbers on all ranks."""
        draws = known.code.first_draws
        if self._noted or len(draws) < 2 or not bool((draws > 0).all()):
            return None
        self._noted = True
        if not bool((draws == draws[0]).all()):
            return None
        return same_draws(known.step, ranks, self._words)


def _differences(known: Gathered, objective: SameObjective) -> dict[str, Parts]:
    found = {kind: parts for kind in KINDS if (parts := differing(known.code, kind))}
    return found if objective.parts is None else {**found, OBJECTIVE: objective.parts}


def differing(code: Code[Tensor], kind: str) -> Parts | None:
    """Ranks by equal value, the largest part first; None where all are equal, or where some rank's is not known."""
    values: Tensor = getattr(code, kind)
    if not bool((values != 0).all()) or bool((values == values[0]).all()):
        return None
    return parts_of(values.tolist())


def _named(parts: Mapping[str, Parts], arrived: Arrived) -> Mapping[str, Parts]:
    """With the ranks themselves, where they are known."""
    if arrived.make is None:
        return parts
    return {kind: differing(arrived.all.code, kind) or part for kind, part in parts.items()}
