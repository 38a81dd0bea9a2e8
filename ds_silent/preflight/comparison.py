"""Before step 1: do the ranks agree where they must, and which rank is the odd one out?

    outcome = compare(local_items(...), group, device)     # inventory.py; the same call on every rank; see messages.py

Only hashes travel, as int32. One all-reduce says of every item whether it is the same on all ranks: 16 bytes per item.
Of the items that differ, and of those alone, every rank's hash is gathered: 8 bytes per rank and item, of at most
``MIB_OF_HASHES`` MiB or ``FEWEST_ASKED`` items; the others of a group are asked about by one hash of all of them. An
all-reduce brings the values as text: of each group of equal ranks the first one speaks, for at most ``MAX_VALUES``
groups. The same three calls before that, about one hash per group of items, make sure that all ranks ask the same
questions: a rank with other parameters gives an event, not a hang.

A rank is named only where more than half of all ranks agree against it: never for 2 ranks, never in a tie. What a rank
can check by itself (``check_item``: is my share of the data one of N?) needs no majority and names whoever failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ds_silent.distributed.guard import CollectiveCall, unguarded
from ds_silent.distributed.parts import Parts, outvoted, parts_of_numbers
from ds_silent.exchange.collectives import gather_on_host, same_on_all
from ds_silent.maths.fingerprint import hash_bytes, hash_text
from ds_silent.preflight.items import GROUPS, PASSED, Expectation, Group, Hashes, Item, item_of

MAX_TEXTS = 32  # differing items whose values travel as text
MAX_VALUES = 8  # of each item, the largest groups' first
TEXT_BYTES = 160  # of each value
MIB_OF_HASHES, FEWEST_ASKED = 4, 32
"""How much of the ranks' single hashes is gathered. 4 MiB hold all items of 8 to 64 ranks (65,536 to 8,192 of them),
512 at 1,024 ranks, 32 at 16,384; never fewer than 32 items."""


@dataclass(frozen=True)
class ItemOutcome:
    """What the ranks said about one item."""

    item: Item  # this rank's
    parts: Parts  # ranks of equal hash; the largest part first, then by first rank
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


# -- what the hashes say (pure) --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What the ranks said about an item on which they differ."""

    parts: Parts
    passed: tuple[int, ...]  # ranks, of a check
    joint: bool = False

    @classmethod
    def of(cls, hashes: Hashes, joint: bool = False) -> Said:
        """From (N, 2) int32."""
        passed = (hashes == np.array(PASSED, dtype=np.int32)).all(1)
        numbers = np.ascontiguousarray(hashes).view(np.int64).reshape(-1)
        return cls(parts_of_numbers(numbers), tuple(passed.nonzero()[0].tolist()), joint)


def judged(
    items: Sequence[Item], ranks: int, said: Mapping[int, Said], texts: Mapping[int, Sequence[str]]
) -> PreflightOutcome:
    """The outcome on N ``ranks``, from what was said about the items that differ, by index, and their parts' values."""
    everybody = tuple(range(ranks))
    agreed = {passed: Said((everybody,), everybody if passed else ()) for passed in (False, True)}
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


def _verdict(expectation: Expectation, said: Said, ranks: int) -> tuple[bool, tuple[int, ...]]:
    """Whether it is as expected, and who is odd; of ranks that collide all are told, none is the right one."""
    same, distinct = len(said.parts) == 1, len(said.parts) == ranks
    passed = len(said.passed) == ranks
    as_expected = {"passed": passed, "equal": same, "alike": same or distinct, "different": distinct}
    if as_expected.get(expectation, True):
        return True, ()
    if expectation == "passed":
        return False, tuple(sorted(set(range(ranks)).difference(said.passed)))
    if expectation == "different":
        return False, tuple(sorted(rank for part in said.parts if len(part) > 1 for rank in part))
    return False, outvoted(said.parts)


# -- the collectives -------------------------------------------------------------------------------------------------


def compare(
    items: Sequence[Item], group: dist.ProcessGroup, device: torch.device, collective: CollectiveCall = unguarded
) -> PreflightOutcome:
    """Exchange and compare. A collective that waits: every rank calls it once, before its first step.

    Args:
        items: what this rank found; the others' lists should be alike, and it is an event when they are not.
        device: of the group's backend; buffers are int32.
    """
    kept = collective(lambda: items)  # run again, what the first calls were about
    return compared(kept, EveryRank(group, device, collective))


def compared(items: Sequence[Item], ranks: EveryRank) -> PreflightOutcome:
    """:func:`compare`, over any way to reach the other ranks."""
    outcome = _asked(lists_of(items), ranks)
    return outcome if outcome.wrong else _asked(items, ranks)  # the same on every rank: no rank goes on alone


def _asked(items: Sequence[Item], ranks: EveryRank) -> PreflightOutcome:
    own = np.array([item.hash for item in items], dtype=np.int32).reshape(-1, 2)
    apart = np.flatnonzero(~ranks.same(own)).tolist() if items else []
    if not apart:
        return judged(items, ranks.size, {}, {})
    single, joint = questions(items, apart, max(FEWEST_ASKED, MIB_OF_HASHES * (1 << 20) // (8 * ranks.size)))
    of_many = [hash_bytes(own[members].tobytes()) for members in joint]
    answers = ranks.hashes(np.concatenate([own[single], np.array(of_many, dtype=np.int32).reshape(-1, 2)]))
    said = {index: Said.of(answers[:, column]) for column, index in enumerate(single)}
    for column, members in enumerate(joint, len(single)):
        said |= dict.fromkeys(members, Said.of(answers[:, column], joint=True))
    outcome = judged(items, ranks.size, said, {})
    wrong = _in_turns(items, [index for index in sorted(said) if not outcome.items[index].ok])[:MAX_TEXTS]
    slots = [(index, part[0]) for index in wrong for part in said[index].parts[:MAX_VALUES]]
    if not slots:
        return outcome
    texts: dict[int, list[str]] = {index: [] for index in wrong}
    spoken = ranks.texts([items[index].shown for index, _ in slots], [speaker for _, speaker in slots])
    for (index, _), text in zip(slots, spoken, strict=True):
        texts[index].append(text)
    return judged(items, ranks.size, said, texts)


def _in_turns(items: Sequence[Item], places: Sequence[int]) -> list[int]:
    """Order places so that each group has its turn: of many weights that differ, not all come first."""
    of_group: Counter[str] = Counter()
    turns = []
    for place in places:
        of_group[items[place].group] += 1
        turns.append((of_group[items[place].group], place))
    return [place for _, place in sorted(turns)]


def questions(items: Sequence[Item], apart: Sequence[int], room: int) -> tuple[list[int], list[list[int]]]:
    """Which of the items that differ are asked about one by one, and which together with others of their group.

    Only items that should be equal are put together: when ranks are equal in all of them, they are in each. The first
    of each group come before the second of any, so that no group is left without.
    """
    alone = [index for index in apart if items[index].expectation != "equal"]
    equal = _in_turns(items, [index for index in apart if items[index].expectation == "equal"])
    single = sorted([*alone, *equal][: max(room, len(alone))])
    groups: dict[Group, list[int]] = {}
    for index in sorted(set(apart) - set(single)):
        groups.setdefault(items[index].group, []).append(index)
    return single, list(groups.values())


class EveryRank:
    """The ranks of a process group, as this one reaches them; each call is a collective of a size that all know."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, collective: CollectiveCall):
        self._group, self._device, self._collective = group, device, collective

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def same(self, own: Hashes) -> npt.NDArray[np.bool_]:
        """(I,) of this rank's (I, 2) int32, which of them all ranks have alike."""
        return np.asarray(same_on_all(self._sent(own), self._group, self._collective).all(1).numpy())

    def hashes(self, own: Hashes) -> Hashes:
        """(Q, 2) int32 of this rank to (N, Q, 2) of all."""
        gathered: Hashes = gather_on_host(self._sent(own), self._group, self._collective).numpy()
        return gathered

    def texts(self, own: Sequence[str], speakers: Sequence[int], size: int = TEXT_BYTES) -> list[str]:
        """What rank ``speakers[i]`` has as its i-th text, of ``size`` bytes at most."""
        me = dist.get_rank(self._group)
        pairs = zip(own, speakers, strict=True)
        said = np.stack([_text_slot(text if me == rank else "", size) for text, rank in pairs])
        slots = self._collective(lambda: self._sent(said))  # run again, the buffer that was reduced
        # of each slot one rank has the text, and the others zeros
        self._collective(lambda: dist.all_reduce(slots, op=dist.ReduceOp.SUM, group=self._group))
        return [slot.astype("<i4").tobytes().rstrip(b"\0").decode("utf-8", "ignore") for slot in slots.cpu().numpy()]

    def _sent(self, numbers: Hashes) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)


def _text_slot(text: str, size: int) -> Hashes:
    data = text.encode("utf-8", "replace")[:size]
    return np.frombuffer(data.ljust(size, b"\0"), dtype="<i4").astype(np.int32)


def lists_of(items: Sequence[Item]) -> list[Item]:
    """One item per group: is the list of what is compared the same on every rank?"""
    lists = []
    for group in GROUPS:
        names = [(one.name, _strict(one.expectation), one.severity) for one in items if one.group == group]
        kinds = Counter(expectation for _, expectation, _ in names)
        shown = ", ".join(f"{count} expected {kind}" for kind, count in sorted(kinds.items()))
        lists.append(item_of(f"list of {group}", group, hash_text(repr(names)), shown or "no items"))
    return lists


def _strict(expectation: Expectation) -> Expectation:
    """Of two that cannot be an event, one: which of them it is depends on the rank's own model."""
    return "free" if expectation == "better different" else expectation
