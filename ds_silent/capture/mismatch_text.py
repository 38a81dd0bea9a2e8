"""What is said where the ranks' code does not do the same: sentences and remedies. Pure.

mismatches_of(events, gathered, ranks)  # of the comparison, item by item
unlike(parts, step)                     # of the hashes alone
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ds_silent.capture.untrained import Unlike
from ds_silent.distributed.parts import Parts, outvoted, ranks_of
from ds_silent.exchange.observation import Gathered
from ds_silent.records import Event, EventKind
from ds_silent.text import Words

OBJECTIVE: Literal["objective"] = "objective"
"""Compared by :mod:`ds_silent.capture.same_objective`."""
TRAINS = "trains"
_REMEDIES = {  # by group of the preflight
    "optimizer": "Change hyper-parameters on every rank alike: look for a scheduler or callback that skips ranks.",
    "parameters": "Call train(), eval() and requires_grad_() on every rank alike: look for an evaluation or a freezing "
    "that some ranks run and do not undo.",
    "settings": "Make the model with the same numbers on every rank, and change them on every rank at the same step.",
    "autocast": "Enter torch.autocast with the same arguments around the forward on every rank.",
    "holdings": "Give every rank's optimizer the same parameters in the same groups.",
    "counters": "Load the same checkpoint on every rank, with the optimizer's state, and step it on every rank.",
    OBJECTIVE: "Make the loss on every rank alike: look for a branch on the rank, another configuration of the loss, a "
    "sum for a mean, and a division by accumulation, tokens or ranks that is missing or done twice.",
}
GROUPS_OF_KINDS = {
    "hyper_parameters": "optimizer",
    "device_hyper_parameters": "optimizer",
    "training_modes": "parameters",
    "trainable": "parameters",
    "settings": "settings",
    "autocast": "autocast",
    "counters": "counters",
    OBJECTIVE: OBJECTIVE,
}
"""Fields of :class:`ds_silent.exchange.observation.Code`, and the group of each."""
_WORDS = {
    "optimizer": "hyper-parameters",
    "parameters": "training modes or trainable parameters",
    "settings": "settings of the model's modules",
    "autocast": "autocast states",
    "counters": "optimizers' step counters",
    OBJECTIVE: "objectives",
}
_BEGINNINGS = {  # of an item's name, and what it is one of
    "training mode": "parameters",
    "trainable flags": "parameters",
    "settings of": "settings",
    "autocast": "autocast",
    "optimizer's parameters": "holdings",
    "optimizer's step": "counters",
}


def same_draws(step: int, ranks: int, words: Words) -> Event:
    """The note that all ranks use the same masks."""
    message = (
        f"The first forward drew the same random numbers on all {ranks} ranks: dropout and other noise use "
        "the same masks on different rows, so that they average less than they could."
    )
    remedy = (
        "Nothing is wrong. If masks are to differ, seed each rank's generators with seed + rank once the model is "
        f"made; leave them alike where ranks must draw alike ({words.same_draws})."
    )
    return Event(step, "same-draws", "info", (), "first forward", None, None, message, remedy)


def unlike(parts: Mapping[str, Parts], step: int) -> tuple[Unlike, ...]:
    """What the hashes alone say."""
    found: dict[tuple[str, Parts], Unlike] = {}
    for kind, ranks in parts.items():
        group = GROUPS_OF_KINDS[kind]
        shown = "; ".join(ranks_of(part) for part in ranks[:3])
        message = f"The {_WORDS[group]} differ between ranks: {shown}{'; …' if len(ranks) > 3 else ''}."
        odd = outvoted(ranks) or (tuple(sorted(sum(ranks, ()))) if group == OBJECTIVE else ())
        found[group, ranks] = _one(group, odd, _WORDS[group], message, step)
    return tuple(found.values())


def _one(group: str, odd: tuple[int, ...], where: str, message: str, step: int) -> Unlike:
    kind: EventKind = "objective-mismatch" if group == OBJECTIVE else "config-mismatch"
    return Unlike(f"unlike:{group}:{odd}", odd, where, message, _REMEDIES[group], step, kind)


def mismatches_of(events: Sequence[Event], known: Gathered, ranks: int) -> tuple[Unlike, ...]:
    """What the comparison of the items found."""
    found, lacks = [], any((event.where or "").startswith("optimizer's parameters") for event in events)
    for event in events:
        where = event.where or "parameters"
        if lacks and where == f"parameters that nothing {TRAINS}":  # for that reason
            continue
        group = next((group for begin, group in _BEGINNINGS.items() if where.startswith(begin)), "optimizer")
        if event.kind == "objective-mismatch":
            message = _upper(event.message) + weighing(known, event.ranks, ranks)
            found.append(_one(OBJECTIVE, event.ranks or tuple(range(ranks)), "loss", message, event.step))
        else:
            found.append(_one(group, event.ranks, where, event.message, event.step))
    return tuple(found)


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def weighing(known: Gathered, odd: Sequence[int], ranks: int) -> str:
    """What the labels of the odd ranks and of another weigh, where that is known of each rank."""
    if known.ranks != ranks or not bool((known.objective.known > 0).all()):
        return ""
    other = next((rank for rank in range(ranks) if rank not in odd), None)
    weights = (known.objective.weight / known.loss.scale).tolist()
    if all(math.isclose(weight, weights[0], rel_tol=1e-3) for weight in weights):
        return ""
    shown = (*odd[:3], other) if odd and other is not None else range(min(ranks, 4))
    together = ", ".join(f"{weights[rank]:.4g} on rank {rank}" for rank in shown if rank is not None)
    return f" All labels of this step weigh together {together}."
