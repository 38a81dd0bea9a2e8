"""What the preflight says: events, the console's table, ``preflight.json``. Pure.

events_of(outcome)  # what the sinks get
table(outcome)      # what the console shows
to_json(outcome)    # preflight.json
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ds_silent.distributed.parts import SHOWN_RANKS, Parts, ranks_of
from ds_silent.maths.statistics import expected_coverage
from ds_silent.preflight.comparison import MAX_VALUES, TEXT_BYTES, ItemOutcome, PreflightOutcome
from ds_silent.preflight.items import GROUPS, JOINT, MODULES_HOOKS, SUBSET
from ds_silent.records import Event, EventKind, Severity
from ds_silent.text import one_line

NOBODY = " There is no majority, so no rank is named."
MAX_ROWS = 32  # of a group in the table
WHOLE_RANKS = 64  # up to which ``preflight.json`` lists all ranks of all groups
_KINDS: Mapping[str, EventKind] = {
    "sampler's share": "duplicate-data",
    "sampler: a share for each rank": "duplicate-data",
    "sampler: a rank for each share": "low-coverage",
    "weights": "initial-weights-mismatch",
    "generators": "seed-mismatch",
    "sampler": "data-order-mismatch",
    "objective": "objective-mismatch",
}
"""Of an item by its name, or else by its group."""
_OF_MODEL = ("list of weights", "list of parameters", "list of optimizer")
"""They follow from the model: where the same ranks have another one, the first stands for all."""
_REMEDIES: Mapping[EventKind, str] = {
    "initial-weights-mismatch": "Load the same checkpoint, or seed before the model is made, on every rank; change no "
    "weight between the wrapper and the first step on one rank alone.",
    "seed-mismatch": "Seed all ranks alike, or each from its rank, after the process group exists.",
    "data-order-mismatch": "Give every rank's sampler the same seed, epoch, data set and number of replicas.",
    "duplicate-data": "Give each rank's sampler its own rank and the real world size, once the process group exists.",
    "low-coverage": "Give every rank's sampler the real world size, once the process group exists; accelerate cuts the "
    "data itself, and wants no DistributedSampler in what it prepares.",
    "objective-mismatch": "Make the loss on every rank alike.",
    "config-mismatch": "Start every rank from the same code, configuration and environment.",
}
REMEDIES_OF = {
    SUBSET: "Split the data set alike on every rank, as random_split does with a generator of the same seed: the "
    "sampler deals each rank its share of one list. Until then some rows are trained several times, others never, and "
    "those that one rank holds out another trains on.",
    "training mode": "Call train(), eval() and requires_grad_() on every rank alike: look for an evaluation or a "
    "freezing that some ranks run and do not undo.",
    MODULES_HOOKS: "Do nothing where it only looks, as a tracker's does on one rank. Else register it on every rank, "
    "or on none.",
}
"""Of an item by its name."""
_STYLES: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}  # the worst first


def events_of(outcome: PreflightOutcome, step: int = 0) -> list[Event]:
    """One event per kind, group and set of odd ranks, however many items show it; the worst first.

    ``ranks`` are the odd ones out, the ranks that collide, or none without a majority; ``where`` is the first item.
    """
    together: dict[tuple[EventKind, str, Severity, int], list[ItemOutcome]] = {}
    alike: dict[Parts, int] = {}
    numbers: dict[int, int] = {}  # by identity: to hash the groups of thousands of ranks takes a millisecond
    models: list[Parts] = []
    for one in outcome.wrong:
        item = one.item
        if item.name in _OF_MODEL:
            if one.parts in models:
                continue
            models.append(one.parts)
        if id(one.parts) not in numbers:
            numbers[id(one.parts)] = alike.setdefault(one.parts, len(alike))
        kind = _KINDS.get(item.name) or _KINDS.get(item.group, "config-mismatch")
        together.setdefault((kind, item.group, item.severity, numbers[id(one.parts)]), []).append(one)
    events = []
    for (kind, _, severity, _), found in together.items():
        name, remedy = found[0].item.name, REMEDIES_OF.get(found[0].item.name, _REMEDIES[kind])
        events.append(Event(step, kind, severity, found[0].odd, name, None, None, _sentence(found), remedy))
    return sorted(events, key=lambda event: list(_STYLES).index(event.severity))


def _sentence(found: Sequence[ItemOutcome]) -> str:
    first, ranks = found[0], len(found[0].parts)
    if first.item.expectation == "passed":
        return f"{_failures(first)} ({ranks_of(first.odd)})."
    more = f" (and {len(found) - 1} more differ in the same way)" if len(found) > 1 else ""
    if first.item.expectation == "different":
        shared = [(index, part) for index, part in enumerate(first.parts) if len(part) > 1][:3]
        collide = "; ".join(f"{ranks_of(part)} all have {_shown(first, index)}" for index, part in shared)
        return f"{first.item.name} must differ between ranks, but {collide}{more}."
    values = "; ".join(f"{_shown(first, i)} on {ranks_of(part)}" for i, part in enumerate(first.parts[:3]))
    if ranks > 3:
        values += f"; {ranks - 3} more value{'s' if ranks > 4 else ''}"
    nobody = "" if first.odd else NOBODY
    missed = ""
    shuffled = first.item.name in ("sampler's seed", "sampler's permutation")
    if shuffled and all(len(part) == 1 for part in first.parts):
        missed = f" An epoch would see {expected_coverage(ranks):.1%} of the rows, some of them again."
    verb = "differ" if first.item.name.startswith(("settings of", "hooks on")) else "differs"
    return f"{first.item.name} {verb} between ranks: {values}{more}.{nobody}{missed}"


def _failures(one: ItemOutcome) -> str:
    """What the ranks that failed a check found."""
    odd = set(one.odd)
    indices = [index for index, part in enumerate(one.parts) if part[0] in odd]
    shown = [_shown(one, index) for index in indices[:3]]
    return "; ".join(shown) + (f"; {len(indices) - 3} more" if len(indices) > 3 else "")


def _shown(one: ItemOutcome, index: int) -> str:
    """The value of one part; "one value" where no text travelled, or two parts show the same beginning."""
    known = len(one.parts) == 1 or (len(one.texts) > 1 and index < len(one.texts))  # else there is this rank's own
    texts = short_numbers(own_parts(one.texts))
    if not known or texts.count(texts[index]) > 1:
        return f"{texts[index] if known else ''} [value {index + 1}]".strip()
    return texts[index]


def own_parts(texts: Sequence[str]) -> list[str]:
    """Of values that are lists, what not all of them hold; a part that was cut is none, where another is left."""
    whole = [_to_a_boundary(text) for text in texts]
    if len(texts) < 2 or not any(JOINT in text for text in texts):
        return whole
    lists = [text.split(JOINT)[: -1 if len(text.encode()) >= TEXT_BYTES else None] for text in texts]
    common = set(lists[0]).intersection(*lists[1:])
    own = [[part for part in parts if part not in common] for parts in lists]
    return [JOINT.join(parts) or "none of these" for parts in own] if any(own) else whole


def _to_a_boundary(text: str) -> str:
    """Leave out the word in which a text was cut, and mark the cut."""
    if len(text.encode()) < TEXT_BYTES:
        return text
    return f"{text.rpartition(' ')[0] or text} …"


def verdict(one: ItemOutcome) -> str:
    """In a few words: equal, each its own, free, or what is wrong."""
    expected = one.item.expectation
    if expected == "passed":
        return "passed" if one.ok else f"not so on {ranks_of(one.odd)}"
    if one.agrees and not one.ok:
        return "equal, must differ"
    if one.agrees:
        return "equal, better different" if expected == "better different" else "equal"
    if one.ok:
        return {"better different": "different", "free": "free"}.get(expected, "each rank its own")
    return f"{ranks_of(one.odd)} differ{'s' if len(one.odd) == 1 else ''}" if one.odd else "no agreement"


_PLAIN = {
    **dict.fromkeys(("passed", "equal", "each rank its own", "different"), "as expected"),
    "equal, better different": "the same on all ranks, where different ones are usual",
    "free": "different between ranks, which is allowed",
}
"""What the table says of several items that are as expected, by :func:`verdict`."""


def table(outcome: PreflightOutcome) -> Table:
    """What is not as expected, and one row for the rest of each group."""
    ranks = f"{outcome.world_size} rank{'s' * (outcome.world_size != 1)}"
    drawn = Table("item", title=f"ds_silent preflight: {ranks}", title_justify="left")
    drawn.add_column("value", overflow="ellipsis", no_wrap=True, max_width=60)
    drawn.add_column("verdict")
    for group in GROUPS:
        members = [one for one in outcome.items if one.item.group == group]
        fine = [one for one in members if one.ok]
        if fine:
            verdicts = Counter(_PLAIN.get(short := verdict(one), short) for one in fine)
            said = ", ".join(f"{count} {words}" for words, count in verdicts.items())
            drawn.add_row(group, f"{len(fine)} item{'s' * (len(fine) != 1)}", Text(said, style="green"))
        wrong = [one for one in members if not one.ok]
        for one in wrong[:MAX_ROWS]:
            name, value = one_line(one.item.name), one_line(" | ".join(short_numbers(one.texts)))
            drawn.add_row(Text(name), Text(value), Text(verdict(one), style=_STYLES[one.item.severity]))
        if len(wrong) > MAX_ROWS:
            drawn.add_row(group, f"{len(wrong) - MAX_ROWS} more items", "not as expected, see preflight.json")
    return drawn


def to_json(outcome: PreflightOutcome) -> dict[str, Any]:
    """``preflight.json``: every item with what was expected, who has what, and the verdict.

    Above ``WHOLE_RANKS`` ranks at most 8 groups of equal ranks are listed with 8 ranks each, and 8 odd ranks; where
    that is not all of them, ``cut`` has the counts: of the groups, of the ranks in each that is listed, of odd ranks.
    """
    return {
        "version": 1,
        "world_size": outcome.world_size,
        "ok": not outcome.wrong,
        "items": [_item_json(one, outcome.world_size) for one in outcome.items],
    }


def _item_json(one: ItemOutcome, world_size: int) -> dict[str, Any]:
    parts, ranks = (None, None) if world_size <= WHOLE_RANKS else (MAX_VALUES, SHOWN_RANKS)
    listed = one.parts[:parts]
    written = {
        "name": one.item.name,
        "group": one.item.group,
        "expected": one.item.expectation,
        "ok": one.ok,
        "verdict": verdict(one),
        "odd_ranks": list(one.odd[:ranks]),
        "ranks": [list(part[:ranks]) for part in listed] if not one.agrees else "all",
        "values": list(one.texts),
    }
    if one.joint:
        written["joint"] = True
    if ranks and not one.agrees:
        written["cut"] = {"groups": len(one.parts), "sizes": [len(part) for part in listed], "odd": len(one.odd)}
    return written


# -- numbers as people write them

LONG = 9  # digits: fewer are what somebody wrote, or a version
RELATIVE = 1e-7  # to which the short number is the long one: about float32's own precision
_NUMBER = re.compile(r"(?<![\w.+-])-?\d+\.\d+(?:e[-+]?\d+)?(?![\w.])", re.IGNORECASE)


def short_numbers(texts: Sequence[str]) -> list[str]:
    """The same texts, that are read side by side, with each long number as the shortest of its float32.

    A number keeps all its digits where another one of the texts would look the same.
    """
    numbers = {number for text in texts for number in _NUMBER.findall(text)}
    shown = {number: _short(number) for number in numbers}
    values = {number: float(number) for number in numbers}
    looks = Counter(look for look, _ in {(float(shown[number]), values[number]) for number in numbers})
    kept = {number: short if looks[float(short)] == 1 else number for number, short in shown.items()}
    return [_NUMBER.sub(lambda found: kept[found.group()], text) for text in texts]


def _short(number: str) -> str:
    value = float(number)
    with np.errstate(all="ignore"):  # beyond float32's range it is not near, and stays as it is
        short = str(np.float32(value))
    near = abs(float(short) - value) <= RELATIVE * abs(value)
    return short if near and sum(map(str.isdigit, number)) > LONG else number
