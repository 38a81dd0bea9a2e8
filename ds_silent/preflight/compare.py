"""Before step 1: do the ranks agree where they must, and which rank is the odd one out?

    outcome = compare(local_items(...), group, device)     # inventory.py; the same call on every rank
    events_of(outcome)                                     # what the sinks get
    table(outcome)                                         # what the console shows
    to_json(outcome)                                       # preflight.json

Only hashes travel, as int32, in an all-gather of every item's hash. A small one before it makes sure that all ranks
ask the same questions - a rank with other parameters gives an event, not a hang - and, when something differs, one
after it brings the differing values as text. All three have sizes that every rank knows beforehand.

A rank is named only where more than half of all ranks agree against it: never for 2 ranks, never in a tie. What a rank
can check by itself (``check_item``: is my share of the data one of N?) needs no majority and names whoever failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from ds_silent.exchange.collectives import gather_on_host
from ds_silent.maths.fingerprint import Hash, hash_text
from ds_silent.measure.coverage import expected_coverage
from ds_silent.ranks.parts import Parts, outvoted, parts_of, ranks_of
from ds_silent.ranks.together import Once, at_once
from ds_silent.records import Event, EventKind, Severity

Expectation = Literal["equal", "alike", "different", "passed", "free", "better different"]
"""``alike``: the same on all ranks, or another on every rank (generators: both are policies, a mixture is none).
``better different``: the same on all ranks is said, and no fault.
``passed``: each rank's own check, see :func:`check_item`."""
Group = Literal["weights", "parameters", "generators", "sampler", "optimizer", "config", "code", "environment"]
Hashes = npt.NDArray[np.int32]

GROUPS: tuple[Group, ...] = (
    "weights",
    "parameters",
    "generators",
    "sampler",
    "optimizer",
    "config",
    "code",
    "environment",
)
MAX_TEXTS = 32  # differing items whose values travel as text
TEXT_BYTES = 160  # of each value
SHOWN_VALUES = 8  # in the table
MOST_RANKS = 64  # of one value, and values, in preflight.json
PASSED = hash_text("passed")


@dataclass(frozen=True)
class Item:
    """One thing that is compared. All fields but ``shown`` and ``hash`` must be the same on every rank."""

    name: str
    group: Group
    expectation: Expectation
    shown: str  # the value, for people
    hash: Hash  # of the whole value
    severity: Severity = "error"


@dataclass(frozen=True)
class ItemOutcome:
    """What the ranks said about one item."""

    item: Item  # this rank's
    parts: tuple[tuple[int, ...], ...]  # ranks of equal hash; the largest part first, then by first rank
    texts: tuple[str, ...]  # the value of each part, where it is known; else only this rank's
    ok: bool
    odd: tuple[int, ...]  # ranks that are not what the majority is, or failed a check; empty without a majority

    @property
    def agrees(self) -> bool:
        """Whether all ranks have the same."""
        return len(self.parts) == 1


@dataclass(frozen=True)
class PreflightOutcome:
    """The comparison, the same on every rank except for what agreed items show."""

    world_size: int
    items: tuple[ItemOutcome, ...]

    @property
    def wrong(self) -> tuple[ItemOutcome, ...]:
        return tuple(one for one in self.items if not one.ok)


def item_of(
    name: str,
    group: Group,
    value: str,
    shown: str | None = None,
    expectation: Expectation = "equal",
    severity: Severity = "error",
) -> Item:
    """An item of the whole ``value``, of which ``shown`` is for people."""
    return Item(name, group, expectation, value if shown is None else shown, hash_text(value), severity)


def check_item(name: str, group: Group, ok: bool, shown: str, severity: Severity = "error") -> Item:
    """What this rank found out by itself; ``shown`` is what it found, right or wrong."""
    return Item(name, group, "passed", shown, PASSED if ok else hash_text(f"not passed: {shown}"), severity)


def read_item(
    name: str,
    group: Group,
    reader: Callable[[], str],
    expectation: Expectation = "equal",
    severity: Severity = "error",
) -> Item:
    """An item whose reading may fail: the others must still get this rank's list."""
    try:
        value = reader()
    except Exception as error:  # it is shown, and where it failed on some ranks only it is an event
        value = f"cannot be read ({type(error).__name__})"
    return item_of(name, group, value, None, expectation, severity)


# -- what the hashes say (pure) --------------------------------------------------------------------------------------


def outcome_of(
    items: Sequence[Item], hashes: Hashes, texts: Mapping[int, Sequence[str]] | None = None
) -> PreflightOutcome:
    """Which items are as expected, and who is the odd one out.

    Args:
        items: this rank's, in the order that is the same everywhere.
        hashes: int32 (N, len(items), 2), every rank's.
        texts: by index of an item, what each of the N ranks shows.
    """
    found = []
    for index, item in enumerate(items):
        values = [tuple(pair) for pair in hashes[:, index].tolist()]
        parts = parts_of(values)
        shown: tuple[str, ...] = (item.shown,)
        if texts is not None and index in texts:
            shown = tuple(texts[index][part[0]] for part in parts)
        if item.expectation == "passed":
            odd = tuple(rank for rank, value in enumerate(values) if value != PASSED)
            ok = not odd
        else:
            ok = _as_expected(item.expectation, parts, len(hashes))
            odd = () if ok else _odd(item.expectation, parts)
        found.append(ItemOutcome(item, parts, shown, ok, odd))
    return PreflightOutcome(len(hashes), tuple(found))


def _as_expected(expectation: Expectation, parts: Sequence[Sequence[int]], ranks: int) -> bool:
    if expectation in ("free", "better different"):
        return True
    if expectation == "different":
        return len(parts) == ranks
    return len(parts) == 1 or (expectation == "alike" and len(parts) == ranks)


def _odd(expectation: Expectation, parts: Parts) -> tuple[int, ...]:
    if expectation == "different":  # those that collide: all of them are told, none is the right one
        return tuple(sorted(rank for part in parts if len(part) > 1 for rank in part))
    return outvoted(parts)


# -- the collectives -------------------------------------------------------------------------------------------------


def compare(
    items: Sequence[Item], group: dist.ProcessGroup, device: torch.device, once: Once = at_once
) -> PreflightOutcome:
    """Gathers and compares. A collective that waits: every rank calls it once, before its first step.

    Args:
        items: what this rank found; the others' lists should be alike, and it is an event when they are not.
        device: of the group's backend; buffers are int32.
        once: see :mod:`ds_silent.ranks.together`.
    """
    lists = lists_of(items)
    outcome = _compared(lists, group, device, once)
    # The same on every rank, so that nobody goes on alone.
    return outcome if outcome.wrong else _compared(items, group, device, once)


def _compared(items: Sequence[Item], group: dist.ProcessGroup, device: torch.device, once: Once) -> PreflightOutcome:
    hashes = _gather(np.array([item.hash for item in items], dtype=np.int32).reshape(-1, 2), group, device, once)
    outcome = outcome_of(items, hashes)
    wrong = [index for index, one in enumerate(outcome.items) if not one.ok][:MAX_TEXTS]
    if not wrong:
        return outcome
    slots = np.stack([_text_slot(items[index].shown) for index in wrong])
    gathered = _gather(slots.reshape(-1, 2), group, device, once).reshape(len(hashes), len(wrong), -1)
    texts = {index: [_slot_text(slot) for slot in gathered[:, column]] for column, index in enumerate(wrong)}
    return outcome_of(items, hashes, texts)


def lists_of(items: Sequence[Item]) -> list[Item]:
    """One item per group: is the list of what is compared the same on every rank?"""
    lists = []
    for group in GROUPS:
        names = [(item.name, item.expectation, item.severity) for item in items if item.group == group]
        kinds = Counter(expectation for _, expectation, _ in names)
        shown = ", ".join(f"{count} expected {kind}" for kind, count in sorted(kinds.items()))
        lists.append(Item(f"list of {group}", group, "equal", shown or "no items", hash_text(repr(names))))
    return lists


def _gather(pairs: Hashes, group: dist.ProcessGroup, device: torch.device, once: Once) -> Hashes:
    """(I, 2) int32 of this rank to (N, I, 2) of all."""
    gathered: Hashes = gather_on_host(torch.from_numpy(pairs).to(device), group, once).numpy()
    return gathered


def _text_slot(text: str) -> Hashes:
    data = text.encode("utf-8", "replace")[:TEXT_BYTES]
    return np.frombuffer(data.ljust(TEXT_BYTES, b"\0"), dtype="<i4").astype(np.int32)


def _slot_text(slot: Hashes) -> str:
    return slot.astype("<i4").tobytes().rstrip(b"\0").decode("utf-8", "ignore")


# -- saying it -------------------------------------------------------------------------------------------------------

_KINDS: Mapping[Group, EventKind] = {
    "weights": "initial-weights-mismatch",
    "generators": "seed-mismatch",
    "sampler": "data-order-mismatch",
}
_KINDS_OF_ITEMS: Mapping[str, EventKind] = {
    "sampler's share": "duplicate-data",
    "sampler: a share for each rank": "duplicate-data",
    "sampler: a rank for each share": "low-coverage",
}
_REMEDIES: Mapping[EventKind, str] = {
    "initial-weights-mismatch": "Load the same checkpoint, or seed before the model is made, on every rank.",
    "seed-mismatch": "Seed all ranks alike, or each from its rank, after the process group exists.",
    "data-order-mismatch": "Give every rank's sampler the same seed, epoch, data set and number of replicas.",
    "duplicate-data": "Give each rank's sampler its own rank and the real world size, once the process group exists.",
    "low-coverage": "Give every rank's sampler the real world size, once the process group exists.",
    "config-mismatch": "Start every rank from the same code, configuration and environment.",
}


_STYLES: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def kind_of(item: Item) -> EventKind:
    """The kind of event that an item makes when it is not as expected."""
    return _KINDS_OF_ITEMS.get(item.name) or _KINDS.get(item.group, "config-mismatch")


def events_of(outcome: PreflightOutcome, step: int = 0) -> list[Event]:
    """One event per kind, group and set of odd ranks, however many items show it; the worst first.

    ``ranks`` are the odd ones out, the ranks that collide, or nobody where no majority exists; ``where`` is the first
    item.
    """
    together: dict[tuple[EventKind, str, Severity, tuple[tuple[int, ...], ...]], list[ItemOutcome]] = {}
    for one in outcome.wrong:
        item = one.item
        together.setdefault((kind_of(item), item.group, item.severity, one.parts), []).append(one)
    events = []
    for (kind, _, severity, _), found in together.items():
        first = found[0]
        events.append(
            Event(step, kind, severity, first.odd, first.item.name, None, None, _sentence(found), _REMEDIES[kind])
        )
    return sorted(events, key=lambda event: ("error", "warning", "info").index(event.severity))


def _sentence(found: Sequence[ItemOutcome]) -> str:
    first = found[0]
    if first.item.expectation == "passed":
        return f"{_failures(first)} ({ranks_of(first.odd)})."
    more = f" (and {len(found) - 1} more differ in the same way)" if len(found) > 1 else ""
    if first.item.expectation == "different":
        collide = "; ".join(f"{ranks_of(part)} all have {_shown(first, i)}" for i, part in _colliding(first))
        return f"{first.item.name} must differ between ranks, but {collide}{more}."
    shown = [f"{_shown(first, i)} on {ranks_of(part)}" for i, part in enumerate(first.parts[:3])]
    rest = len(first.parts) - len(shown)
    values = "; ".join(shown) + (f"; {rest} more value{'s' if rest > 1 else ''}" if rest else "")
    nobody = "" if first.odd else " There is no majority, so no rank is named."
    ranks = len(first.parts)
    missed = ""
    shuffled = first.item.name in ("sampler's seed", "sampler's permutation")
    if shuffled and all(len(part) == 1 for part in first.parts):
        missed = f" An epoch would see {expected_coverage(ranks):.1%} of the rows, some of them again."
    return f"{first.item.name} differs between ranks: {values}{more}.{nobody}{missed}"


def _failures(one: ItemOutcome) -> str:
    """What the ranks that failed a check found."""
    indices = [index for index, part in enumerate(one.parts) if set(part) <= set(one.odd)]
    shown = [_shown(one, index) for index in indices[:3]]
    return "; ".join(shown) + (f"; {len(indices) - 3} more" if len(indices) > 3 else "")


def _colliding(one: ItemOutcome) -> list[tuple[int, tuple[int, ...]]]:
    return [(index, part) for index, part in enumerate(one.parts) if len(part) > 1][:3]


def _shown(one: ItemOutcome, index: int) -> str:
    """The value of one part; "one value" where no text travelled, or two parts show the same beginning."""
    if len(one.texts) < len(one.parts) or Counter(one.texts)[one.texts[index]] > 1:
        own = one.texts[index] if len(one.texts) == len(one.parts) else ""
        return f"{own} [value {index + 1}]".strip()
    return one.texts[index]


def verdict(one: ItemOutcome) -> str:
    """In a few words: equal, each its own, free, or what is wrong."""
    if one.item.expectation == "passed":
        return "passed" if one.ok else f"not so on {ranks_of(one.odd)}"
    if one.agrees and one.item.expectation == "better different":
        return "equal, better different"
    if one.agrees:
        return "equal" if one.ok else "equal, must differ"
    if one.ok:
        if one.item.expectation == "better different":
            return "different"
        return "free" if one.item.expectation == "free" else "each rank its own"
    return f"{ranks_of(one.odd)} differ{'s' if len(one.odd) == 1 else ''}" if one.odd else "no agreement"


def table(outcome: PreflightOutcome, full: bool = False) -> Table:
    """What is not as expected, and one row for the rest of each group; with ``full``, a row per item.

    Names and values come from configuration and environment: they are never markup.
    """
    drawn = Table(title=f"ds_silent preflight: {outcome.world_size} ranks", title_justify="left")
    drawn.add_column("item")
    drawn.add_column("value", overflow="ellipsis", no_wrap=True, max_width=60)
    drawn.add_column("verdict")
    for group in GROUPS:
        members = [one for one in outcome.items if one.item.group == group]
        fine = [one for one in members if one.ok]
        if fine and not full:
            verdicts = Counter(verdict(one) for one in fine)
            said = ", ".join(f"{count} {words}" for words, count in verdicts.items())
            drawn.add_row(group, f"{len(fine)} items", Text(said, style="green"))
        for one in members if full else outcome.wrong:
            if one.item.group == group:
                style = "green" if one.ok else _STYLES[one.item.severity]
                value = "…" if one.ok and not one.agrees else " | ".join(one.texts[:SHOWN_VALUES])
                drawn.add_row(Text(_plain(one.item.name)), Text(_plain(value)), Text(verdict(one), style=style))
    return drawn


def to_json(outcome: PreflightOutcome) -> dict[str, Any]:
    """``preflight.json``: every item with what was expected, who has what, and the verdict."""
    return {
        "version": 1,
        "world_size": outcome.world_size,
        "ok": not outcome.wrong,
        "items": [
            {
                "name": one.item.name,
                "group": one.item.group,
                "expected": one.item.expectation,
                "ok": one.ok,
                "verdict": verdict(one),
                "odd_ranks": list(one.odd[:MOST_RANKS]),
                "ranks": [list(part[:MOST_RANKS]) for part in one.parts[:MOST_RANKS]] if not one.agrees else "all",
                "values": list(one.texts[:MOST_RANKS]),
                **_left_out(one, outcome.world_size),
            }
            for one in outcome.items
        ],
    }


def _left_out(one: ItemOutcome, world_size: int) -> dict[str, Any]:
    """Where more than ``MOST_RANKS`` ranks are compared: how many ranks are odd, and have each of the values."""
    if world_size <= MOST_RANKS or one.agrees:
        return {}
    counts = [len(part) for part in one.parts[:MOST_RANKS]]
    return {"odd_ranks_total": len(one.odd), "values_total": len(one.parts), "ranks_of_value": counts}


def _plain(text: str) -> str:
    """Without what could move a terminal's cursor: values come from configuration and environment."""
    return "".join(character if character.isprintable() else " " for character in text)
