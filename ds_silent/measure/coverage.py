"""Which rows the ranks saw: duplicates within a step, and how much of the epoch was seen.

step = unpack_ids(gathered, sampling)              # every rank's ids
shared_rows(step.values, step.owners).count        # exact, of the rows that were sent
epoch = EpochCoverage()
epoch.update(step.values, visits=8192)             # of which those are a sample
epoch.seen(rows_in_epoch=52002)                    # Estimate(value=0.12, standard_error=0.0)
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids
from ds_silent.maths.mixing import mixed_ids

FIRST_ROWS = 256  # of a pass
ALL_PAIRS = 64  # ranks that hold a row, up to which all pairs of them are counted; of more, each with the next one


@dataclass(frozen=True)
class SharedRows:
    """Rows of one step that more than one rank holds. Exact for the ids that were given.

    A row that more than ``ALL_PAIRS`` ranks hold makes pairs of each with the next one only: N - 1 of N ranks that hold
    the same, by which they still hang together as a group.
    """

    count: int  # distinct rows that two or more ranks hold
    pairs: tuple[tuple[int, int, int], ...]  # (rank, rank, rows shared), most first


def shared_rows(values: Ids, owners: Ids) -> SharedRows:
    """Compare one step's rows, int64 (M,), by the rank of each. By sorting, O(M log M) whatever the ranks."""
    order = np.lexsort((owners, values))
    values, owners = values[order], owners[order]
    first = np.ones(len(values), dtype=bool)
    first[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
    values, owners = values[first], owners[first]  # one entry per (row, rank)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else np.empty(0, int)
    holders = np.diff(np.concatenate((starts, [len(values)])))
    return SharedRows(int((holders > 1).sum()), _pairs(owners, starts, holders))


def _pairs(owners: Ids, starts: Ids, holders: Ids) -> tuple[tuple[int, int, int], ...]:
    """Count pairs from the ranks that hold each row, sorted; where those of a row begin, and how many they are."""
    codes, base = [np.empty(0, np.int64)], int(owners.max(initial=0)) + 1
    for count in np.unique(holders[holders > 1]).tolist():
        ranks = owners[starts[holders == count][:, None] + np.arange(count)]  # (rows, count)
        one, other = np.triu_indices(count, 1) if count <= ALL_PAIRS else (np.arange(count - 1), np.arange(1, count))
        codes.append((ranks[:, one] * base + ranks[:, other]).reshape(-1))
    pairs, shared = np.unique(np.concatenate(codes), return_counts=True)
    order = np.lexsort((pairs, -shared))
    pairs, shared = pairs[order], shared[order]
    return tuple(zip((pairs // base).tolist(), (pairs % base).tolist(), shared.tolist(), strict=True))


@dataclass(frozen=True)
class Estimate:
    """A share between 0 and 1, and the standard error of its sampling: 0.0 when it is exact."""

    value: float
    standard_error: float


class EpochCoverage:
    """Distinct rows of one epoch in constant memory: exact for ``capacity`` rows, sampled beyond.

    Rows are kept whose 64-bit hash starts with m zero bits: a sample of *rows* (not of visits) at rate p = 2^-m, the
    same on every rank and after a resume, because the hash is fixed. m is 0 until more than ``capacity`` distinct rows
    came; each time the sample is full m grows by one and half of it goes (adaptive sampling, Flajolet, Computing 43,
    1990). With S kept rows, D = S / p; S is binomial(D, p), so D has standard error sqrt(S (1 - p)) / p: relative to
    D at most sqrt(2 / capacity), 0.6 % at the default.

    What comes may be a sample already: again of rows, chosen by another hash (:class:`ds_silent.exchange.row_ids`).
    Then shares of *its* visits are what is known: of v visits in the sample D brought a new row, and of all visits the
    same share did. Where no row comes twice D is v exactly, so health has no sampling error; else f = D / v has about
    sqrt(f (1 - f) / v) more.

    Memory: a set of at most ``capacity`` integers, about 6 MB at the default, on the host.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 2:
            raise ValueError(f"capacity must be at least 2, got {capacity}")
        self._capacity = capacity
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the epoch that is over."""
        self._level = 0  # m
        self.visits = 0  # each row as often as it came
        self._again = 0  # of them, those that the script has taken beside what it is dealt
        self._known = 0  # visits whose rows came here
        self._seen: set[int] = set()  # hashes

    @property
    def consumed(self) -> int:
        """Count the rows that the epoch has taken of what is dealt."""
        return self.visits - self._again

    @property
    def distinct(self) -> float:
        """Estimate how many different rows were visited in this epoch."""
        each = self.visits / self._known if self._known else 0.0
        return len(self._seen) * 2.0**self._level * each

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Tell which of these rows the epoch has seen; beyond the capacity only rows that are kept are known."""
        return np.array([one in self._seen for one in mixed_ids(ids).tolist()], dtype=bool)

    def update(self, ids: Ids, visits: int | None = None, again: int = 0) -> None:
        """Count one step's rows of all ranks, int64 (rows,).

        Args:
            ids: of the rows.
            visits: how many they are, where ``ids`` are a sample of them.
            again: those of them that the script has taken beside what it is dealt.
        """
        self.visits += len(ids) if visits is None else visits
        self._again += again
        self._known += len(ids)
        hashes = mixed_ids(ids)
        if self._level:
            hashes = hashes[hashes <= largest_hash(self._level)]
        self._seen.update(hashes.tolist())
        while len(self._seen) > self._capacity:
            self._level += 1
            limit = int(largest_hash(self._level))
            self._seen = {one for one in self._seen if one <= limit}

    def seen(self, rows_in_epoch: int | None) -> Estimate:
        """Estimate the share of the epoch's rows that were visited.

        Args:
            rows_in_epoch: rows of the data set; None when nobody knows (iterable data): then the share of the visits
                that brought a new row, which is 1 as long as nothing came twice.
        """
        whole = self.visits if rows_in_epoch is None else rows_in_epoch
        if whole <= 0:
            return Estimate(0.0, 0.0)
        if not self._known:
            return Estimate(min(self.visits / whole, 1.0), min(self.visits / whole, 1.0))
        kept, rate, each = len(self._seen), 2.0**-self._level, self.visits / self._known
        new = min(kept / rate / self._known, 1.0)
        sampling = math.sqrt(max(0.0, 1.0 - 1.0 / each) * new * (1.0 - new) / self._known) * self.visits / whole
        error = math.hypot(math.sqrt(kept * (1 - rate)) / rate * each / whole, sampling)
        return Estimate(min(self.distinct / whole, 1.0), error)

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the epoch: JSON values, the same on all ranks; at most 0.7 MB of text by default."""
        hashes = np.array(sorted(self._seen), dtype="<u8")
        packed = hashes.tobytes()
        return {
            "capacity": self._capacity,
            "level": self._level,
            "visits": self.visits,
            "again": self._again,
            "known": self._known,
            "rows": len(hashes),
            "hashes": base64.b64encode(packed).decode("ascii"),
            "crc": zlib.crc32(packed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with its capacity; a damaged one raises ValueError and changes nothing."""
        try:
            names = "capacity", "level", "visits", "known", "rows"
            capacity, level, visits, known, rows = (int(state[name]) for name in names)
            again = int(state.get("again", 0))  # checkpoints of before have none
            packed = base64.b64decode(str(state["hashes"]), validate=True)
            crc = int(state["crc"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the coverage in the checkpoint cannot be read ({error}): start its epoch again"
            ) from error
        sane = capacity >= 2 and 0 <= level < 64 and 0 <= rows <= min(capacity, known) and known <= visits
        sane = sane and 0 <= again <= visits
        if not sane or len(packed) != rows * 8 or zlib.crc32(packed) != crc:
            raise ValueError("the coverage in the checkpoint is damaged (its checksum differs): start its epoch again")
        self._capacity, self._level, self.visits, self._known, self._again = capacity, level, visits, known, again
        self._seen = set(np.frombuffer(packed, dtype="<u8", count=rows).tolist())


def epoch_is_over(visits: int, step_rows: int, rows_in_epoch: int, ranks: int) -> bool:
    """Tell whether a step of ``step_rows`` rows (all ranks) belongs to the next epoch, for data that does not say so.

    Samplers end an epoch early (``drop_last``) or fill it up so that every rank has as many rows, with fewer than one
    row per rank. A sampler that fills up to a whole global batch must say where its epochs begin.
    """
    return visits + step_rows > rows_in_epoch + ranks - 1


def last_of_epoch(rows: Ids, places: Ids, epoch: EpochCoverage, left: int, droppable: int) -> int:
    """Count how many rows of each rank belong to the old epoch, in a step that an epoch ends in and the next begins.

    A sharded epoch has ceil(n / N) rows per rank, or up to ``droppable`` fewer (``drop_last``): among those the first
    row that the epoch has seen already is the next one's.

    Args:
        rows: of all ranks in the step, or a sample of them.
        places: of each, in the order in which its rank took them.
        epoch: of the rows before them.
        left: rows of a rank that the epoch still has, by its size.
        droppable: rows of a rank that an epoch may leave out at its end.
    """
    least = max(0, left - droppable)
    doubtful = (places >= least) & (places < left)
    again = places[doubtful][epoch.holds(rows[doubtful])]
    return int(again.min()) if len(again) else left


def largest_hash(level: int) -> np.uint64:
    """Return the largest hash that starts with ``level`` zero bits."""
    limit: np.uint64 = np.uint64((1 << (64 - level)) - 1)
    return limit


def smallest_hashes(values: Ids) -> npt.NDArray[np.uint64]:
    """Return the smallest hashes of these rows, by which a pass is known again that begins anew."""
    return np.sort(mixed_ids(values))[:FIRST_ROWS]


def begin_alike(first: npt.NDArray[np.uint64], now: npt.NDArray[np.uint64]) -> bool:
    """Tell whether one part holds all rows of the other, as far as the smallest hashes of both tell."""
    if not len(first) or not len(now):
        return False
    limit = min((int(one[-1]) for one in (first, now) if len(one) == FIRST_ROWS), default=(1 << 64) - 1)
    ours, theirs = (set(one[one <= limit].tolist()) for one in (first, now))
    return bool(ours and theirs) and (ours <= theirs or theirs <= ours)
