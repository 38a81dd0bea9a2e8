"""Before step 1: do the ranks agree where they must, and which rank is the odd one out?

    outcome = compare(local_items(...), group, device)     # inventory.py; the same call on every rank
    events_of(outcome)                                     # what the sinks get
    table(outcome)                                         # what the console shows
    to_json(outcome)                                       # preflight.json

Only hashes travel, as int32. One all-reduce (largest and smallest) says of every item whether it is the same on all
ranks: 16 bytes per item, whatever the number of ranks. Of the items that differ, and of those alone, every rank's hash
is gathered: 8 bytes per rank and item, of at most ``MIB_OF_HASHES`` MiB or ``FEWEST_ASKED`` items; the others of a
group are asked about by one hash of all of them. An all-reduce brings the values as text: of each group of equal ranks
the first one speaks, for at most ``MAX_VALUES`` groups. The same three calls before that, about one hash per group of
items, make sure that all ranks ask the same questions: a rank with other parameters gives an event, not a hang. All
have sizes that every rank knows beforehand.

A rank is named only where more than half of all ranks agree against it: never for 2 ranks, never in a tie. What a rank
can check by itself (``check_item``: is my share of the data one of N?) needs no majority and names whoever failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from ds_silent.distributed.parts import SHOWN_RANKS, Parts, outvoted, parts_of_numbers, ranks_of
from ds_silent.distributed.together import Once, at_once
from ds_silent.exchange.collectives import gather_on_host, same_on_all
from ds_silent.maths.fingerprint import Hash, hash_bytes, hash_text
from ds_silent.maths.statistics import expected_coverage
from ds_silent.preflight.short import short_numbers
from ds_silent.records import Event, EventKind, Severity
from ds_silent.text import one_line

Expectation = Literal["equal", "alike", "different", "passed", "free", "better different"]
"""``alike``: the same on all ranks, or another on every rank (generators: both are policies, a mixture is none).
``better different``: the same on all ranks is said, and no fault.
``passed``: each rank's own check, see :func:`check_item`."""
Group = Literal[
    "weights", "parameters", "generators", "sampler", "optimizer", "config", "code", "environment", "objective"
]
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
    "objective",
)
MAX_TEXTS = 32  # differing items whose values travel as text
MAX_VALUES = 8  # of each item, the largest groups' first
TEXT_BYTES = 160  # of each value
MAX_ROWS = 32  # of a group in the table
MIB_OF_HASHES, FEWEST_ASKED = 4, 32
"""How much of the ranks' single hashes is gathered. 4 MiB hold all items of 8 to 64 ranks (65,536 to 8,192 of them),
512 at 1,024 ranks, 32 at 16,384; never fewer than 32 items."""
WHOLE_RANKS = 64  # up to which ``preflight.json`` lists all ranks of all groups
PASSED = hash_text("passed")
JOINT = "; "
"""Between the parts of a value that is a list: of two such values an event shows what only one of them has."""


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
    joint: bool = False  # ``parts`` are equal in all items of its group that were not asked about one by one

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
    """Which items are as expected, and who is the odd one out, from all that all ranks have.

    Args:
        items: this rank's, in the order that is the same everywhere.
        hashes: int32 (N, len(items), 2), every rank's.
        texts: by index of an item, what each of the N ranks shows.
    """
    apart = (hashes != hashes[0]).any(axis=(0, 2)).nonzero()[0].tolist()
    said = {index: _Said.of(hashes[:, index]) for index in apart}
    of_parts = {
        index: [shown[part[0]] for part in said[index].parts] for index, shown in (texts or {}).items() if index in said
    }
    return _judged(items, len(hashes), said, of_parts)


@dataclass(frozen=True)
class _Said:
    """What the ranks said about an item on which they differ."""

    parts: Parts
    passed: tuple[int, ...]  # ranks, of a check
    joint: bool = False

    @classmethod
    def of(cls, hashes: Hashes, joint: bool = False) -> _Said:
        """From (N, 2) int32."""
        passed = (hashes == np.array(PASSED, dtype=np.int32)).all(1)
        numbers = np.ascontiguousarray(hashes).view(np.int64).reshape(-1)
        return cls(parts_of_numbers(numbers), tuple(passed.nonzero()[0].tolist()), joint)


def _judged(
    items: Sequence[Item], ranks: int, said: Mapping[int, _Said], texts: Mapping[int, Sequence[str]]
) -> PreflightOutcome:
    """The outcome on N ``ranks``, from what was said about the items that differ, by index, and their parts' values."""
    everybody = tuple(range(ranks))
    agreed = {passed: _Said((everybody,), everybody if passed else ()) for passed in (False, True)}
    verdicts: dict[tuple[Expectation, int], tuple[bool, tuple[int, ...]]] = {}  # items asked about together have one
    found = []
    for index, item in enumerate(items):
        one = said.get(index) or agreed[item.hash == PASSED]
        key = item.expectation, id(one)
        if key not in verdicts:
            verdicts[key] = _verdict(item.expectation, one, ranks)
        shown = tuple(texts.get(index, (item.shown,))[:MAX_VALUES])
        found.append(ItemOutcome(item, one.parts, shown, *verdicts[key], one.joint))
    return PreflightOutcome(ranks, tuple(found))


def _verdict(expectation: Expectation, said: _Said, ranks: int) -> tuple[bool, tuple[int, ...]]:
    """Whether it is as expected, and who is odd."""
    if expectation == "passed":
        passed = set(said.passed)
        return len(passed) == ranks, tuple(rank for rank in range(ranks) if rank not in passed)
    ok = _as_expected(expectation, said.parts, ranks)
    return ok, () if ok else _odd(expectation, said.parts)


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


class Ranks(Protocol):
    """All ranks, as this one reaches them; each call is a collective of a size that all of them know."""

    @property
    def size(self) -> int: ...

    def same(self, own: Hashes) -> npt.NDArray[np.bool_]:
        """(I,) of this rank's (I, 2) int32, which of them all ranks have alike."""

    def hashes(self, own: Hashes) -> Hashes:
        """(Q, 2) int32 of this rank to (N, Q, 2) of all."""

    def texts(self, own: Sequence[str], speakers: Sequence[int]) -> list[str]:
        """What rank ``speakers[i]`` has as its i-th text."""


def compare(
    items: Sequence[Item], group: dist.ProcessGroup, device: torch.device, once: Once = at_once
) -> PreflightOutcome:
    """Exchanges and compares. A collective that waits: every rank calls it once, before its first step.

    Args:
        items: what this rank found; the others' lists should be alike, and it is an event when they are not.
        device: of the group's backend; buffers are int32.
        once: see :mod:`ds_silent.distributed.together`.
    """
    kept = once(lambda: items)  # played again, what the first calls were about
    return compared(kept, _Group(group, device, once))


def compared(items: Sequence[Item], ranks: Ranks) -> PreflightOutcome:
    """The same, over any way to reach the other ranks."""
    outcome = _asked(lists_of(items), ranks)
    # The same on every rank, so that nobody goes on alone.
    return outcome if outcome.wrong else _asked(items, ranks)


def _asked(items: Sequence[Item], ranks: Ranks) -> PreflightOutcome:
    if not items:
        return PreflightOutcome(ranks.size, ())
    own = np.array([item.hash for item in items], dtype=np.int32).reshape(-1, 2)
    apart = np.flatnonzero(~ranks.same(own)).tolist()
    if not apart:
        return _judged(items, ranks.size, {}, {})
    single, joint = questions(items, apart, max(FEWEST_ASKED, MIB_OF_HASHES * (1 << 20) // (8 * ranks.size)))
    of_many = [hash_bytes(own[members].tobytes()) for members in joint]
    answers = ranks.hashes(np.concatenate([own[single], np.array(of_many, dtype=np.int32).reshape(-1, 2)]))
    said = {index: _Said.of(answers[:, column]) for column, index in enumerate(single)}
    for column, members in enumerate(joint, len(single)):
        together = _Said.of(answers[:, column], joint=True)
        said |= dict.fromkeys(members, together)
    outcome = _judged(items, ranks.size, said, {})
    wrong = [index for index in sorted(said) if not outcome.items[index].ok][:MAX_TEXTS]
    slots = [(index, part[0]) for index in wrong for part in said[index].parts[:MAX_VALUES]]
    texts: dict[int, list[str]] = {index: [] for index in wrong}
    if slots:
        spoken = ranks.texts([items[index].shown for index, _ in slots], [speaker for _, speaker in slots])
        for (index, _), text in zip(slots, spoken, strict=True):
            texts[index].append(text)
    told = [replace(one, texts=tuple(texts.get(index, one.texts))) for index, one in enumerate(outcome.items)]
    return PreflightOutcome(ranks.size, tuple(told))


def questions(items: Sequence[Item], apart: Sequence[int], room: int) -> tuple[list[int], list[list[int]]]:
    """Which of the items that differ are asked about one by one, and which together with others of their group.

    Only items that should be equal are put together: when ranks are equal in all of them, they are in each. The first
    of each group come before the second of any, so that no group is left without.
    """
    numbers: Counter[Group] = Counter()
    places = []
    for index in apart:
        item = items[index]
        places.append((numbers[item.group] if item.expectation == "equal" else -1, index))
        numbers[item.group] += item.expectation == "equal"
    ordered = sorted(places)
    least = sum(place < 0 for place, _ in ordered)
    single = sorted(index for _, index in ordered[: max(room, least)])
    groups: dict[Group, list[int]] = {}
    for index in sorted(set(apart) - set(single)):
        groups.setdefault(items[index].group, []).append(index)
    return single, list(groups.values())


class _Group:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, once: Once):
        self._group, self._device, self._once = group, device, once

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def same(self, own: Hashes) -> npt.NDArray[np.bool_]:
        return np.asarray(same_on_all(self._sent(own), self._group, self._once).all(1).numpy())

    def hashes(self, own: Hashes) -> Hashes:
        gathered: Hashes = gather_on_host(self._sent(own), self._group, self._once).numpy()
        return gathered

    def texts(self, own: Sequence[str], speakers: Sequence[int]) -> list[str]:
        me = dist.get_rank(self._group)
        said = np.stack([_text_slot(text if me == rank else "") for text, rank in zip(own, speakers, strict=True)])
        slots = self._once(lambda: self._sent(said))  # played again, the buffer that was reduced
        self._once(lambda: dist.all_reduce(slots, op=dist.ReduceOp.SUM, group=self._group))  # one number, else zeros
        return [_slot_text(slot) for slot in slots.cpu().numpy()]

    def _sent(self, numbers: Hashes) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)


_LENIENT: Mapping[Expectation, Expectation] = {"better different": "free"}
"""Neither can be an event, and which of the two it is depends on the rank's own model."""


def lists_of(items: Sequence[Item]) -> list[Item]:
    """One item per group: is the list of what is compared the same on every rank?"""
    lists = []
    for group in GROUPS:
        names = [
            (item.name, _LENIENT.get(item.expectation, item.expectation), item.severity)
            for item in items
            if item.group == group
        ]
        kinds = Counter(expectation for _, expectation, _ in names)
        shown = ", ".join(f"{count} expected {kind}" for kind, count in sorted(kinds.items()))
        lists.append(Item(f"list of {group}", group, "equal", shown or "no items", hash_text(repr(names))))
    return lists


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
    "objective": "objective-mismatch",
}
_KINDS_OF_ITEMS: Mapping[str, EventKind] = {
    "sampler's share": "duplicate-data",
    "sampler: a share for each rank": "duplicate-data",
    "sampler: a rank for each share": "low-coverage",
}
_OF_MODEL = ("list of weights", "list of parameters", "list of optimizer")
"""They follow from the model: where the same ranks have another one, the first stands for all."""
_REMEDIES: Mapping[EventKind, str] = {
    "initial-weights-mismatch": "Load the same checkpoint, or seed before the model is made, on every rank.",
    "seed-mismatch": "Seed all ranks alike, or each from its rank, after the process group exists.",
    "data-order-mismatch": "Give every rank's sampler the same seed, epoch, data set and number of replicas.",
    "duplicate-data": "Give each rank's sampler its own rank and the real world size, once the process group exists.",
    "low-coverage": "Give every rank's sampler the real world size, once the process group exists.",
    "objective-mismatch": "Make the loss on every rank alike.",
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
    together: dict[tuple[EventKind, str, Severity, int], list[ItemOutcome]] = {}
    alike: dict[Parts, int] = {}
    numbers: dict[int, int] = {}  # by identity: to hash the groups of thousands of ranks takes a millisecond
    lists = [one for one in outcome.wrong if one.item.name in _OF_MODEL]
    same_model = {id(one) for place, one in enumerate(lists) if one.parts in [before.parts for before in lists[:place]]}
    for one in outcome.wrong:
        item = one.item
        if id(one) in same_model:
            continue
        if id(one.parts) not in numbers:
            numbers[id(one.parts)] = alike.setdefault(one.parts, len(alike))
        together.setdefault((kind_of(item), item.group, item.severity, numbers[id(one.parts)]), []).append(one)
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
    odd = set(one.odd)
    indices = [index for index, part in enumerate(one.parts) if part[0] in odd]
    shown = [_shown(one, index) for index in indices[:3]]
    return "; ".join(shown) + (f"; {len(indices) - 3} more" if len(indices) > 3 else "")


def _colliding(one: ItemOutcome) -> list[tuple[int, tuple[int, ...]]]:
    return [(index, part) for index, part in enumerate(one.parts) if len(part) > 1][:3]


def _shown(one: ItemOutcome, index: int) -> str:
    """The value of one part; "one value" where no text travelled, or two parts show the same beginning."""
    known = len(one.parts) == 1 or (len(one.texts) > 1 and index < len(one.texts))  # else there is this rank's own
    texts = short_numbers(own_parts(one.texts))
    if not known or one.texts.count(one.texts[index]) > 1:
        return f"{texts[index] if known else ''} [value {index + 1}]".strip()
    return texts[index]


def own_parts(texts: Sequence[str]) -> list[str]:
    """Of values that are lists, what not all of them hold; a part that was cut is none, where another is left."""
    if len(texts) < 2 or not any(JOINT in text for text in texts):
        return list(texts)
    lists = [text.split(JOINT) for text in texts]
    lists = [
        parts[:-1] if len(text.encode()) >= TEXT_BYTES else parts for parts, text in zip(lists, texts, strict=True)
    ]
    common = set(lists[0]).intersection(*lists[1:])
    own = [[part for part in parts if part not in common] for parts in lists]
    return [JOINT.join(parts) or "none of these" for parts in own] if any(own) else list(texts)


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
        listed = members if full else [one for one in members if not one.ok]
        for one in listed if full else listed[:MAX_ROWS]:
            style = "green" if one.ok else _STYLES[one.item.severity]
            value = "…" if one.ok and not one.agrees else " | ".join(short_numbers(one.texts))
            drawn.add_row(Text(one_line(one.item.name)), Text(one_line(value)), Text(verdict(one), style=style))
        if not full and len(listed) > MAX_ROWS:
            drawn.add_row(group, f"{len(listed) - MAX_ROWS} more items", "not as expected, see preflight.json")
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
    written: dict[str, Any] = {
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
