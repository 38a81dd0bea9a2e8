"""What all ranks must have alike before they observe together, agreed over the process group's key-value store.

    verdict = agree(group, "block", Statement(True, values=...))      # the same call on every rank of ``group``
    if verdict.sentence: ...                                         # the same on every rank

No collective: what ranks disagree about here is whether, and how, they communicate. A store never meets a collective of
the training, and it can time out. Each rank posts a hash of what it has and counts itself; the last to arrive sees
from one counter whether all hashes are its own, and only if not, it reads what everybody said. So a rank makes a
handful of store operations, whatever the number of ranks; one rank makes N more when something is wrong.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_silent.distributed.parts import listed, outvoted, parts_of, ranks_of
from ds_silent.text import TORCH, Words

logger = logging.getLogger("ds_silent")
TIMEOUT_VARIABLE = "DS_SILENT_TIMEOUT"
TIMEOUT_SECONDS = 300.0
SHOWN_VALUES = 3
_meetings: dict[str, int] = {}  # how often this process has met the others of a group, by topic


@dataclass(frozen=True)
class Statement:
    """What one rank has. Two ranks agree when ``version``, ``refusal`` and ``values`` are the same.

    Attributes:
        present: whether this rank wants to observe; where nobody does, nothing else is looked at.
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
        """Equal where two ranks agree."""
        said = [self.version, self.refusal, dict(self.values)] if self.present else None
        return hashlib.sha256(json.dumps([self.present, said], sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Verdict:
    """What all ranks know then, the same on every one.

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
    """Seconds that ranks wait for each other; from the environment, where a number greater than 0 stands there."""
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
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return Verdict(mine.refusal, refused=mine.refusal is not None)
    store = store_of_all()
    if store is None:  # no store behind this backend: everybody must trust in everybody
        return Verdict(mine.refusal, refused=mine.refusal is not None)
    members = hashlib.sha256(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
    place = f"{members}/{topic}"
    _meetings[place] = meeting = _meetings.get(place, 0) + 1
    try:
        return _Meeting(store, f"ds_silent/{place}/{meeting}", ranks, me, words).hold(mine)
    except Exception as error:  # the rank that holds the store is gone
        broken = f"the process group's store cannot be reached ({type(error).__name__}: {error})"
        return Verdict(broken if mine.present else None, me)


class _Meeting:
    """One agreement; the keys of the store begin with ``prefix``."""

    def __init__(self, store: Any, prefix: str, ranks: int, me: int, words: Words):
        self._store, self._prefix, self._ranks, self._me, self._words = store, prefix, ranks, me, words

    def hold(self, mine: Statement) -> Verdict:
        seconds = timeout_seconds()
        self._store.set(self._key("said", self._me), json.dumps(asdict(mine), default=str))
        alike = self._store.add(self._key("alike", mine.key), 1)
        last = self._store.add(self._key("arrived"), 1) == self._ranks
        if last and self._decides():
            # every rank counted itself among those alike before it counted itself as arrived
            alike = self._store.add(self._key("alike", mine.key), 0)
            agreed = Verdict(mine.refusal, refused=mine.refusal is not None)
            self._say(agreed if alike == self._ranks else self._judge(range(self._ranks)))
        verdict = self._heard(seconds)
        if verdict is None and self._decides():
            came = [rank for rank in range(self._ranks) if self._store.check([self._key("said", rank)])]
            self._say(self._late(came, seconds))
        verdict = verdict or self._heard(seconds) or Verdict(f"no rank answered within {seconds:g} s", self._me)
        if verdict.sentence is None:
            self._forget()
        return verdict

    def _decides(self) -> bool:
        """Whether this rank is the one that says the verdict."""
        return bool(self._store.add(self._key("decided"), 1) == 1)

    def _judge(self, ranks: Sequence[int]) -> Verdict:
        said = [self._read(rank) for rank in ranks]
        if not any(statement.present or statement.refusal for statement in said):
            return Verdict()
        refused = any(statement.refusal is not None for statement in said)
        rest = [replace(one, refusal=None) if one.writers else one for one in said]
        if refused and rest[0].refusal is None and len({one.key for one in rest}) == 1:
            return Verdict(next(one.refusal for one in said if one.writers), 0, refused=True, agreed=True)
        return Verdict(differences(said), 0, outvoted(parts_of(statement.key for statement in said)), refused=refused)

    def _late(self, came: Sequence[int], seconds: float) -> Verdict:
        said = [self._read(rank) for rank in came]
        if not any(statement.present or statement.refusal for statement in said):
            return Verdict()  # nobody wants to observe: it is nobody's business who else is there
        missing = tuple(rank for rank in range(self._ranks) if rank not in set(came))
        sentence = (
            f"{ranks_of(missing)} did not come to ds_silent within {seconds:g} s, {ranks_of(came)} did: call "
            f"{self._words.begin} on every rank of the data-parallel group, or wait longer ({TIMEOUT_VARIABLE}, in "
            "seconds)"
        )
        return Verdict(sentence, self._me, missing, missing)

    def _read(self, rank: int) -> Statement:
        return Statement(**json.loads(self._store.get(self._key("said", rank))))

    def _say(self, verdict: Verdict) -> None:
        self._store.set(self._key("verdict"), json.dumps(asdict(verdict)))

    def _heard(self, seconds: float) -> Verdict | None:
        try:
            self._store.wait([self._key("verdict")], timedelta(seconds=seconds))
        except Exception:  # the store's own error type differs between versions (2.4: RuntimeError)
            return None
        said = json.loads(self._store.get(self._key("verdict")))
        odd, missing = tuple(said["odd"]), tuple(said["missing"])
        return Verdict(said["sentence"], said["teller"], odd, missing, said["refused"], said["agreed"])

    def _forget(self) -> None:
        """What nobody reads any more need not stay in the memory of the rank that holds the store."""
        try:
            self._store.delete_key(self._key("said", self._me))
        except Exception as error:
            logger.debug("ds_silent: a key stays in the store: %s", error)

    def _key(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))


def store_of_all() -> Any:
    """The store that the process group was made with (``torch.distributed.distributed_c10d``, 2.4 to 2.15), or None."""
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception as error:
        logger.debug("ds_silent: this process group has no store: %s", error)
        return None


# -- saying it (pure) ------------------------------------------------------------------------------------------------


def differences(said: Sequence[Statement]) -> str:
    """Who has what, in one sentence, from every rank's statement."""
    everybody = range(len(said))
    refusals = {statement.refusal for statement in said}
    if len(refusals) == 1 and None not in refusals:
        return str(said[0].refusal)
    parts, told = [], sorted(filter(None, refusals))
    for refusal in told[:SHOWN_VALUES]:
        parts.append(f"{ranks_of([r for r in everybody if said[r].refusal == refusal])}: {refusal}")
    if len(told) > SHOWN_VALUES:
        parts.append(f"{len(told) - SHOWN_VALUES} more refusals of other ranks")
    for absent in sorted({s.absent for s in said if not s.present and s.refusal is None}):
        parts.append(
            f"{ranks_of([r for r in everybody if said[r].absent == absent and not said[r].present])}: {absent}"
        )
    observing = [rank for rank in everybody if said[rank].present and said[rank].refusal is None]
    if parts and observing:
        parts.append(f"{ranks_of(observing)}: nothing wrong")
    versions = {rank: said[rank].version for rank in observing}
    if len(set(versions.values())) > 1:
        parts.append(f"the version of ds_silent is {_who_has_what(versions)}")
    names = sorted({name for rank in observing for name in said[rank].values})
    for name in names:
        values = {rank: said[rank].values.get(name) for rank in observing}
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            parts.append(f"{name} is {_who_has_what(values)}")
    return "; ".join(parts)


def _who_has_what(values: Mapping[int, Any]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(rank)
    largest = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    shown = [f"{text if len(text) <= 60 else text[:57] + '...'} on {ranks_of(ranks)}" for text, ranks in largest]
    return listed(shown, SHOWN_VALUES, "values")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested object as one level of dotted names."""
    result: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        result |= flat(inner, f"{name}.") if isinstance(inner, Mapping) else {name: inner}
    return result
