"""Agree, over the process group's key-value store, on what all ranks must have alike before they observe.

    verdict = agree(group, "block", Statement(True, values=...))      # the same call on every rank of ``group``
    if verdict.sentence: ...                                         # the same on every rank

    board = Board("model", ranks=(0, 2, 4, 6))                       # on each of them: values for the others
    board.leave(step, {"squares": 1.5})
    board.heard(step, rank=2)                                        # None where it has not been left, or no longer is

No collective: what ranks disagree about here is whether, and how, they communicate; and a store can time out. Each rank
posts a hash of what it has and counts itself. The last to arrive sees from one counter whether all hashes are its own,
and reads what every rank said only if not: a handful of operations per rank, and N more on one where something is
wrong. A :class:`Board` is for groups that may stop observing, or take their steps, one later than another: a collective
between them could hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_silent.distributed.parts import listed, outvoted, parts_of, ranks_of
from ds_silent.text import TORCH, Words, shortened

logger = logging.getLogger("ds_silent")
TIMEOUT_VARIABLE = "DS_SILENT_TIMEOUT"
TIMEOUT_SECONDS = 300.0
SHOWN_VALUES = 3
KEPT = 8
"""Of what a rank has left on a board, the newest: who is further behind hears nothing."""
_meetings: Counter[str] = Counter()


@dataclass(frozen=True)
class Statement:
    """State what one rank has. Two ranks agree when ``version``, ``refusal`` and ``values`` are the same.

    Attributes:
        present: whether this rank wants to observe; where no rank does, nothing else is looked at.
        absent: in a few words, what it has instead.
        refusal: the sentence by which this rank refuses; None where all is well.
        writers: whether the refusal is of what no other rank looks at.
        values: by name, JSON values.
    """

    present: bool
    absent: str = ""
    version: str = ""
    refusal: str | None = None
    writers: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return a hash that is equal where two ranks agree."""
        said = [self.version, self.refusal, dict(self.values)] if self.present else None
        return hashlib.sha256(json.dumps([self.present, said], sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Verdict:
    """Tell what the ranks have agreed on; the same on every rank.

    Attributes:
        sentence: what is wrong, without a remedy; None where all agree.
        teller: rank in the group that says it to the user.
        odd: ranks that are not what more than half of all are; empty without a majority.
        missing: ranks that did not come.
        refused: whether some rank refuses; else what they have differs.
        agreed: whether it refuses for all, who have the same.
    """

    sentence: str | None = None
    teller: int = 0
    odd: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    refused: bool = False
    agreed: bool = False


def timeout_seconds() -> float:
    """Return the seconds that ranks wait for each other: from the environment, where it holds a number above 0."""
    try:
        seconds = float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT_SECONDS))
    except ValueError:
        return TIMEOUT_SECONDS
    return seconds if 0 < seconds < 1e6 else TIMEOUT_SECONDS


def agree(group: dist.ProcessGroup, topic: str, mine: Statement, words: Words = TORCH) -> Verdict:
    """Wait for every rank of ``group`` and hear whether all say the same. Every rank calls it; no collective.

    Args:
        topic: what is agreed on; ranks meet by the group's members, the topic and how often they have met.
        words: the framework's, for the ranks that did not come.

    Returns:
        the verdict, the same on every rank that came. A rank that has nothing to observe hears of a time-out only if
        others have.
    """
    store = store_of_all()
    if store is None or dist.get_world_size(group) == 1:  # without a store, every rank must trust in the others
        return _all_say(mine)
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    try:
        return _Meeting(store, meeting(topic, ranks), len(ranks), me, words).hold(mine)
    except Exception as error:  # the rank that holds the store is gone
        broken = f"the process group's store cannot be reached ({type(error).__name__}: {error})"
        return Verdict(broken if mine.present else None, me)


def _all_say(mine: Statement) -> Verdict:
    return Verdict(mine.refusal, refused=mine.refusal is not None)


class _Meeting:
    """Hold one agreement; the keys of the store begin with ``prefix``."""

    def __init__(self, store: Any, prefix: str, ranks: int, me: int, words: Words):
        self._store, self._prefix, self._ranks, self._me, self._words = store, prefix, ranks, me, words

    def hold(self, mine: Statement) -> Verdict:
        """Say what this rank has, and wait for what is decided."""
        seconds = timeout_seconds()
        self._store.set(self._key("said", self._me), json.dumps(asdict(mine), default=str))
        alike = self._store.add(self._key("alike", mine.key), 1)
        last = self._store.add(self._key("arrived"), 1) == self._ranks
        if last and self._decides():
            # every rank counted itself among those alike before it counted itself as arrived
            alike = self._store.add(self._key("alike", mine.key), 0)
            self._say(_all_say(mine) if alike == self._ranks else self._judge(range(self._ranks), seconds))
        verdict = self._heard(seconds)
        if verdict is None and self._decides():
            came = [rank for rank in range(self._ranks) if self._store.check([self._key("said", rank)])]
            self._say(self._judge(came, seconds))
        verdict = verdict or self._heard(seconds) or Verdict(f"no rank answered within {seconds:g} s", self._me)
        if verdict.sentence is None:
            self._forget()
        return verdict

    def _decides(self) -> bool:
        """Tell whether this rank is the one that posts the verdict."""
        return bool(self._store.add(self._key("decided"), 1) == 1)

    def _judge(self, came: Sequence[int], seconds: float) -> Verdict:
        said = [Statement(**json.loads(self._store.get(self._key("said", rank)))) for rank in came]
        if not any(statement.present or statement.refusal for statement in said):
            return Verdict()  # no rank wants to observe, so missing ranks are no error
        missing = tuple(sorted(set(range(self._ranks)).difference(came)))
        if missing:
            sentence = (
                f"{ranks_of(missing)} did not come to ds_silent within {seconds:g} s, {ranks_of(came)} did: call "
                f"{self._words.begin} on every rank of the data-parallel group, or wait longer ({TIMEOUT_VARIABLE}, in "
                "seconds)"
            )
            return Verdict(sentence, self._me, missing, missing)
        refused = any(statement.refusal is not None for statement in said)
        rest = [replace(one, refusal=None) if one.writers else one for one in said]
        if refused and rest[0].refusal is None and len({one.key for one in rest}) == 1:
            return Verdict(next(one.refusal for one in said if one.writers), 0, refused=True, agreed=True)
        return Verdict(differences(said), 0, outvoted(parts_of(statement.key for statement in said)), refused=refused)

    def _say(self, verdict: Verdict) -> None:
        self._store.set(self._key("verdict"), json.dumps(asdict(verdict)))

    def _heard(self, seconds: float) -> Verdict | None:
        try:
            self._store.wait([self._key("verdict")], timedelta(seconds=seconds))
        except Exception:  # the store's own error type differs between versions (2.4: RuntimeError)
            return None
        said: dict[str, Any] = json.loads(self._store.get(self._key("verdict")))
        return Verdict(**said | {name: tuple(said[name]) for name in ("odd", "missing")})

    def _forget(self) -> None:
        """Free the memory of the rank that holds the store."""
        try:
            self._store.delete_key(self._key("said", self._me))
        except Exception as error:
            logger.debug("ds_silent: a key stays in the store: %s", error)

    def _key(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))


# -- saying it (pure) ------------------------------------------------------------------------------------------------


def differences(said: Sequence[Statement]) -> str:
    """Say who has what, in one sentence, from every rank's statement."""
    everybody = range(len(said))
    refusals = sorted({one.refusal for one in said if one.refusal})
    if len(refusals) == 1 and all(one.refusal is not None for one in said):
        return refusals[0]
    parts = [
        f"{ranks_of([rank for rank in everybody if said[rank].refusal == refusal])}: {refusal}"
        for refusal in refusals[:SHOWN_VALUES]
    ]
    if len(refusals) > SHOWN_VALUES:
        parts.append(f"{len(refusals) - SHOWN_VALUES} more refusals of other ranks")
    for absent in sorted({one.absent for one in said if not one.present and one.refusal is None}):
        lacking = [rank for rank in everybody if said[rank].absent == absent and not said[rank].present]
        parts.append(f"{ranks_of(lacking)}: {absent}")
    observing = [rank for rank in everybody if said[rank].present and said[rank].refusal is None]
    if parts and observing:
        parts.append(f"{ranks_of(observing)}: nothing wrong")
    compared: dict[str, dict[int, Any]] = {}
    compared["the version of ds_silent"] = {rank: said[rank].version for rank in observing}
    for name in sorted({name for rank in observing for name in said[rank].values}):
        compared[name] = {rank: said[rank].values.get(name) for rank in observing}
    for name, values in compared.items():
        if len(set(map(_as_text, values.values()))) > 1:
            parts.append(f"{name} is {_who_has_what(values)}")
    return "; ".join(parts)


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _who_has_what(values: Mapping[int, Any]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(_as_text(value), []).append(rank)
    largest = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"{shortened(text, 60)} on {ranks_of(ranks)}" for text, ranks in largest]
    return listed(shown, SHOWN_VALUES, "values")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested object to one level of dotted names."""
    result: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        result |= flat(inner, f"{name}.") if isinstance(inner, Mapping) else {name: inner}
    return result


def store_of_all() -> Any:
    """Return the process group's own store (``torch.distributed.distributed_c10d``, 2.4 to 2.15), or None."""
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception as error:
        logger.debug("ds_silent: this process group has no store: %s", error)
        return None


def meeting(topic: str, ranks: Sequence[int]) -> str:
    """Return what the keys begin with at which ``ranks`` meet: another prefix each time that this process asks."""
    members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    place = f"ds_silent/{members}/{topic}"
    _meetings[place] += 1
    return f"{place}/{_meetings[place]}"


class Board:
    """Leave values for other ranks, and read theirs.

    Args:
        topic: what it is for; the same on every rank.
        ranks: of the whole training, in the same order on every one; this one is among them.
    """

    def __init__(self, topic: str, ranks: Sequence[int]):
        self._name = meeting(topic, ranks)
        self._store, self._me = store_of_all(), dist.get_rank()
        self._left: deque[str] = deque()  # keys
        self._newest, self._times_back = -1, 0

    def leave(self, step: int, said: object) -> None:
        """Leave what this rank has to say of a step; JSON values. A step before the last one begins another round."""
        if self._store is None:
            return
        self._times_back += step < self._newest
        self._newest, key = step, self._key(step, self._me)
        self._store.set(key, json.dumps(said))
        if key not in self._left:
            self._left.append(key)
        if len(self._left) > KEPT:
            self._store.delete_key(self._left.popleft())

    def heard(self, step: int, rank: int, wait: timedelta | None = None) -> Any:
        """Read what a rank has left of a step, waiting at most ``wait``; None where there is nothing."""
        if self._store is None:
            return None
        key = self._key(step, rank)
        try:
            if wait is not None:
                self._store.wait([key], wait)
            elif not self._store.check([key]):
                return None
        except RuntimeError:  # it did not come
            return None
        return json.loads(self._store.get(key))

    def _key(self, step: int, rank: int) -> str:
        return f"{self._name}/{self._times_back}/{step}/{rank}"
