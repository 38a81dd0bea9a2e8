"""What every rank's code must do alike while it trains: hyper-parameters and what optimizers hold, their step counters,
evaluation mode, which parameters train, the settings of modules, autocast, the loss, where labels come from. ``GROUPS``
lists them.

    check = SettingsCheck(LocalSettings(module, optimizers, framework), framework, guard)
    found = check.agree(arrived)                         # on all ranks alike, once per gathered observation

Each is a few hundred numbers on the host, hashed to 24 bits (fp32 carries them exactly; two settings look alike by
chance once in 17 million) and sent with the observation; the hash is made anew only when something has changed. Where
the ranks' hashes differ, all ranks have read so and ask each other once, by the preflight's comparison, what it is that
differs. A collective runs only where the set of ranks that differ is another one than before, and ``MOST_QUESTIONS``
times at most.

The random numbers of a rank's first training forward are compared too: where they are the same on all ranks, all use
the same dropout masks on different rows. That is how many scripts seed, and no fault: a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ds_silent.capture.local_settings import (
    HYPER_PARAMETERS,
    INPUTS,
    LABELS,
    OBJECTIVE,
    PICKED,
    SCALES,
    TRAINS,
    LocalSettings,
)
from ds_silent.capture.same_objective import SameObjective
from ds_silent.capture.untrained import NOTHING, Missed, Unlike, reported
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.distributed.parts import Parts, outvoted, parts_of, ranks_of
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.observation import Code, Gathered
from ds_silent.framework import Framework
from ds_silent.preflight.comparison import TEXT_BYTES, PreflightOutcome, compare
from ds_silent.preflight.inventory import dropout_probabilities
from ds_silent.preflight.items import ALL_HOOKS, HOOKS, SUBSET
from ds_silent.preflight.messages import NOBODY, REMEDIES_OF, events_of
from ds_silent.preflight.settings import lacks_hook
from ds_silent.records import Event, EventKind
from ds_silent.text import Words, everybody

MOST_QUESTIONS = 64  # per run
_EXTREMES: Parts = ((0,), (1,))  # of many ranks all know only the smallest and the largest hash


@dataclass(frozen=True)
class _Group:
    """Settings that are worded together."""

    words: str  # what differs, where nothing but the hashes is known
    remedy: str
    kinds: tuple[str, ...] = ()  # fields of :class:`ds_silent.exchange.observation.Code`, where 0 is not known
    items: tuple[str, ...] = ()  # how the names begin of what is compared when the hashes differ
    preflight: tuple[str, ...] = ()  # groups in which the preflight may have told of it
    event: EventKind = "config-mismatch"
    effects: tuple[str, ...] = ()  # keys of the findings that follow of it


GROUPS = {
    "optimizer": _Group(
        "hyper-parameters",
        "Change hyper-parameters on every rank alike: look for a scheduler or callback that skips ranks.",
        kinds=("hyper_parameters", "device_hyper_parameters"),
        preflight=("optimizer", "config"),
    ),
    "parameters": _Group(
        "training modes or trainable parameters",
        REMEDIES_OF["training mode"],
        kinds=("training_modes", "trainable"),
        items=("training mode", "trainable flags"),
        preflight=("parameters",),
    ),
    "settings": _Group(
        "settings of the model's modules",
        "Make the model with the same numbers on every rank, and change them on every rank at the same step.",
        kinds=("settings",),
        items=("settings of",),
        preflight=("parameters",),
    ),
    "autocast": _Group(
        "autocast states",
        "Enter torch.autocast with the same arguments around the forward on every rank.",
        kinds=("autocast",),
        items=("autocast",),
    ),
    "holdings": _Group(
        "optimizers' parameters",
        "Give every rank's optimizer the same parameters in the same groups.",
        items=("optimizer's parameters",),
    ),
    "counters": _Group(
        "optimizers' step counters",
        "Load the same checkpoint on every rank, with the optimizer's state, and step it on every rank.",
        kinds=("counters",),
        items=("optimizer's step",),
        preflight=("optimizer", "config"),
    ),
    OBJECTIVE: _Group(
        "objectives",
        "Make the loss on every rank alike: look for a branch on the rank, another configuration of the loss, a sum "
        "for a mean, and a division by accumulation, tokens or ranks that is missing or done twice.",
        kinds=(OBJECTIVE,),
        preflight=(OBJECTIVE,),
        event="objective-mismatch",
    ),
    INPUTS: _Group(
        "scales of the losses' inputs",
        "Give the loss the same temperature, or scale of its inputs, on every rank: look for a branch on the rank and "
        "another configuration.",
        kinds=(INPUTS,),
        items=(SCALES,),
        event="objective-mismatch",
    ),
    "hooks": _Group(
        HOOKS,
        "Register a hook that changes gradients on every rank, or on none; one that only looks may stay on one rank.",
        kinds=("hooks",),
        items=(HOOKS,),
        event="outlier-rank",
        effects=("aggregation-error",),  # one that runs behind the observer's changes what it has measured
    ),
    "labels": _Group(
        "places of the labels",
        "Shift the labels by one place on every rank alike: look at the collator, and at the files that a rank reads.",
        kinds=("label_places",),
        items=(LABELS,),
        event="objective-mismatch",
    ),
    "data": _Group(
        "subsets of the data",
        REMEDIES_OF[SUBSET],
        kinds=(PICKED,),
        items=(SUBSET,),
        preflight=("sampler",),
        event="data-order-mismatch",
        effects=("data-order-mismatch", "low-coverage"),
    ),
}
_GROUP_OF = {kind: name for name, group in GROUPS.items() for kind in group.kinds}

_News = tuple[dict[str, set[Parts]], dict[str, Parts], int]


class SettingsCheck:
    """Hold what all ranks know of each other's settings; ``differing``: at the step that was read last."""

    def __init__(self, local: LocalSettings, framework: Framework, guard: CollectiveGuard):
        self.local, self._framework, self._guard = local, framework, guard
        self._same_objective, self._same_inputs = SameObjective(), SameObjective()
        self._missed = NOTHING  # of all ranks, as it was reported last
        self.differing: Mapping[str, Parts] = {}
        self._asked: dict[str, Parts] = {}
        self._answer: tuple[Unlike, ...] = ()
        self._known: dict[str, set[Parts]] = {}  # reported before step 1
        self._questions = 0
        self._noted = False

    def told_before(self, outcome: PreflightOutcome) -> None:
        """Do not tell again what the preflight has told, while the same ranks differ."""
        for kind, group in _GROUP_OF.items():
            parts = {one.parts for one in outcome.wrong if one.item.group in GROUPS[group].preflight}
            self._known[kind] = parts | {_EXTREMES} if parts else parts
        if any(one.item.group == "optimizer" for one in outcome.wrong):
            self.local.ignore_untrained()

    def agree(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """Return what the ranks do not do alike.

        Every rank calls it with the same observations, at the same step: where the ranks that differ are others than
        before, it is a collective that waits.
        """
        framework, guard = self._framework, self._guard
        self._same_objective = guard.agreed(partial(self._same_objective.of, arrived.known))
        self._same_inputs = guard.agreed(partial(self._same_inputs.of_inputs, arrived.known))
        self.differing = guard.agreed(lambda: _differences(arrived.known, self._same_objective, self._same_inputs))
        news = guard.agreed(lambda: self._news(self.differing))
        if news is not None:
            self._known, self._asked, self._questions = news
            self._answer = unlike(_named(self._asked, arrived), arrived.step)
            if self._asked and self._questions <= MOST_QUESTIONS:
                structural = self._same_objective.structural
                items = guard.local(self.local.items, arrived.step, self._asked, structural) or []
                outcome = compare(items, framework.group, framework.device, guard.collective)
                hooks = next((one.texts for one in outcome.items if one.item.name == ALL_HOOKS), ())
                whole = [text for text in hooks if len(text) < TEXT_BYTES]
                untold = {ALL_HOOKS} if lacks_hook(whole) else {ALL_HOOKS, HOOKS}
                if not arrived.known.code.hyper_parameters.all():  # a rank leaves the step out
                    untold.update(HYPER_PARAMETERS.values())
                events = [event for event in events_of(outcome, arrived.step) if event.where not in untold]
                told = mismatches_of(events, arrived.known, outcome.world_size)
                self._answer = told or (() if set(self._asked) == {"hooks"} else self._answer)
        self._missed = self._missed_by_all(arrived)
        return *self._answer, *reported(self._missed, arrived.step)

    def _missed_by_all(self, arrived: Arrived) -> Missed:
        """Return what all ranks miss alike; what differs is asked."""
        values = arrived.known.code.trainable
        alike = bool((values == values[0]).all()) and bool((values != 0).all())
        return self.local.missed_at(arrived.step) if alike else NOTHING

    def _news(self, parts: Mapping[str, Parts]) -> _News | None:
        """Return what is known, asked, and how often, where other ranks differ than before; the same on every rank."""
        known = {kind: self._known.get(kind, set()) & {parts.get(kind, ())} for kind in _GROUP_OF}
        new = {kind: found for kind, found in parts.items() if found not in known[kind]}
        if new == self._asked:
            self._known = known
            return None
        return known, new, self._questions + bool(new)

    def unasked(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """Return the same without asking, where the ranks come together no more; nothing where it is told already."""
        same, inputs = self._same_objective.of(arrived.known), self._same_inputs.of_inputs(arrived.known)
        parts = _differences(arrived.known, same, inputs)
        new = {kind: found for kind, found in parts.items() if found not in self._known.get(kind, ())}
        missed = self._missed_by_all(arrived)
        return (
            *(() if new == self._asked else unlike(_named(new, arrived), arrived.step)),
            *(() if missed == self._missed else reported(missed, arrived.step)),
        )

    def note(self, known: Gathered, ranks: int) -> Event | None:
        """Note, once, that the first forward drew the same random numbers on all ranks."""
        draws = known.code.first_draws
        if self._noted or len(draws) < 2 or not bool((draws > 0).all()):
            return None
        self._noted = True
        if not bool((draws == draws[0]).all()):
            return None
        return same_draws(known.step, ranks, self._framework.words, bool(dropout_probabilities(self._framework.module)))


def _differences(known: Gathered, objective: SameObjective, inputs: SameObjective) -> dict[str, Parts]:
    at_once = _GROUP_OF.keys() - {OBJECTIVE, INPUTS}
    found = {kind: parts for kind in _GROUP_OF if kind in at_once and (parts := differing(known.code, kind))}
    if objective.parts is not None:
        return {**found, OBJECTIVE: objective.parts}
    return found if inputs.parts is None else {**found, INPUTS: inputs.parts}


def differing(code: Code[Tensor], kind: str) -> Parts | None:
    """Group the ranks by equal value, the largest part first; None where all are equal, or one is not known."""
    values = getattr(code, kind).numpy()  # ten times as fast as torch for so few
    if not values.all() or (values == values[0]).all():
        return None
    return parts_of(values.tolist())


def _named(parts: Mapping[str, Parts], arrived: Arrived) -> Mapping[str, Parts]:
    """Name the ranks themselves, where they are known."""
    if arrived.make is None:
        return parts
    return {kind: differing(arrived.all.code, kind) or part for kind, part in parts.items()}


# -- what is said of it ------------------------------------------------------------------------------------------------


def same_draws(step: int, ranks: int, words: Words, drops: bool) -> Event:
    """Make the note that all ranks use the same masks; ``drops``: the model is known to have dropout."""
    of_it = "dropout and other noise use the same masks" if drops else "noises, if it draws any, are the same"
    message = (
        f"The first forward drew the same random numbers on {everybody(ranks)}: {of_it} "
        "on each rank's rows, so that they average less than they could."
    )
    remedy = (
        "Nothing is wrong. If masks are to differ, seed each rank's generators with seed + rank once the model is "
        f"made; leave them alike where ranks must draw alike ({words.same_draws})."
    )
    return Event(step, "same-draws", "info", (), "first forward", None, None, message, remedy)


def unlike(parts: Mapping[str, Parts], step: int) -> tuple[Unlike, ...]:
    """Word what the hashes alone say."""
    found: dict[tuple[str, Parts], Unlike] = {}
    for kind, ranks in parts.items():
        group = _GROUP_OF[kind]
        words = GROUPS[group].words
        shown = "; ".join(ranks_of(part) for part in ranks[:3])
        message = f"The {words} differ between ranks: {shown}{'; …' if len(ranks) > 3 else ''}."
        odd = outvoted(ranks) or (tuple(sorted(sum(ranks, ()))) if group == OBJECTIVE else ())
        found[group, ranks] = _one(group, odd, words, message, step)
    return tuple(found.values())


def _one(group: str, odd: tuple[int, ...], where: str, message: str, step: int) -> Unlike:
    own = GROUPS[group]
    return Unlike(f"unlike:{group}:{odd}", odd, where, message, own.remedy, step, own.event, effects=own.effects)


def mismatches_of(events: Sequence[Event], known: Gathered, ranks: int) -> tuple[Unlike, ...]:
    """Word what the comparison of the items found."""
    found, lacks = [], any((event.where or "").startswith("optimizer's parameters") for event in events)
    for event in events:
        where = event.where or "parameters"
        if lacks and where == f"parameters that nothing {TRAINS}":  # for that reason
            continue
        group = next((name for name, group in GROUPS.items() if where.startswith(group.items)), "optimizer")
        if event.kind != "objective-mismatch":
            odd, message = event.ranks, event.message
            if not odd and GROUPS[group].event == "outlier-rank":  # one of them is
                odd, message = tuple(range(ranks)), message.removesuffix(NOBODY)
            found.append(_one(group, odd, where, message, event.step))
            continue
        message = event.message[:1].upper() + event.message[1:]
        group = group if group in ("labels", INPUTS) else OBJECTIVE
        message += weighing(known, event.ranks, ranks) if group == OBJECTIVE else ""
        odd = event.ranks or tuple(range(ranks))
        found.append(_one(group, odd, "labels" if group == "labels" else "loss", message, event.step))
    return tuple(found)


def weighing(known: Gathered, odd: Sequence[int], ranks: int) -> str:
    """Say what the labels of the odd ranks and of another weigh, where that is known of each rank."""
    if known.ranks != ranks or not bool((known.objective.known > 0).all()):
        return ""
    other = next((rank for rank in range(ranks) if rank not in odd), None)
    weights = (known.objective.weight / known.loss.scale).tolist()
    if all(math.isclose(weight, weights[0], rel_tol=1e-3) for weight in weights):
        return ""
    some = ranks > 4 and odd and other is not None
    shown = [*odd[:3], other] if some else range(min(ranks, 4))
    together = ", ".join(f"{weights[rank]:.4g} on rank {rank}" for rank in shown if rank is not None)
    return f" All labels of this step weigh together {together}."
