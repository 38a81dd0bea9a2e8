"""Which rows the ranks saw: duplicates within a step, and how much of the epoch was seen.

step = unpack_ids(gathered)                        # every rank's ids
duplicates(step.per_rank).count                    # exact
epoch = EpochCoverage()
epoch.update(np.concatenate(step.per_rank))
epoch.seen(rows_in_epoch=52002)                    # Estimate(value=0.12, standard_error=0.0)
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids, mix64

MAX_PAIR_RANKS = 512  # above, the N x N table of shared rows is not made


# -- duplicates within a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Duplicates:
    """Rows of one step that more than one rank holds. Exact for the ids that were given."""

    count: int  # distinct rows that two or more ranks hold
    pairs: tuple[tuple[int, int, int], ...]  # (rank, rank, rows shared), most first; empty above MAX_PAIR_RANKS ranks


def duplicates(ids: Sequence[Ids]) -> Duplicates:
    """Compares one step's ids of all ranks; ``ids[rank]`` int64 (rows,), of any length."""
    values = np.concatenate([*ids, np.empty(0, np.int64)])
    owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    order = np.lexsort((owners, values))
    values, owners = values[order], owners[order]
    first = np.ones(len(values), dtype=bool)
    first[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
    values, owners = values[first], owners[first]  # one entry per (row, rank)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else np.empty(0, int)
    holders = np.diff(np.concatenate((starts, [len(values)])))
    many = np.repeat(holders > 1, holders)
    row_of, owners = np.repeat(np.arange(len(holders)), holders)[many], owners[many]
    return Duplicates(int((holders > 1).sum()), _pairs(row_of, owners, len(ids)))


def _pairs(row_of: Ids, owners: Ids, ranks: int) -> tuple[tuple[int, int, int], ...]:
    if ranks > MAX_PAIR_RANKS or len(owners) == 0:
        return ()
    table, rows = np.zeros((ranks, ranks)), np.unique(row_of, return_inverse=True)[1]
    for begin in range(0, int(rows.max()) + 1, 4096):  # bounds the one-hot table
        part = (rows >= begin) & (rows < begin + 4096)
        holds = np.zeros((4096, ranks))
        holds[rows[part] - begin, owners[part]] = 1
        table += holds.T @ holds
    first, second = np.nonzero(np.triu(table, 1))
    found = [(int(a), int(b), int(table[a, b])) for a, b in zip(first, second, strict=True)]
    return tuple(sorted(found, key=lambda pair: (-pair[2], pair)))


# -- the epoch -------------------------------------------------------------------------------------------------------


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
        self._visits = 0
        self._seen: set[int] = set()  # hashes

    @property
    def visits(self) -> int:
        """Rows that were visited in this epoch, each as often as it came."""
        return self._visits

    @property
    def exact(self) -> bool:
        """Whether every row is kept."""
        return self._level == 0

    @property
    def rate(self) -> float:
        """Share of the rows that are kept."""
        return float(2.0**-self._level)

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these rows the epoch has seen; beyond the capacity only rows that are kept are known."""
        hashes = mix64(np.ascontiguousarray(ids).view(np.uint64))
        return np.array([one in self._seen for one in hashes.tolist()], dtype=bool)

    def update(self, ids: Ids) -> None:
        """Count the visits of one step, of all ranks: int64 (rows,), in any order."""
        self._visits += len(ids)
        hashes = mix64(np.ascontiguousarray(ids, dtype=np.int64).view(np.uint64))  # no two ids share one
        if self._level:
            hashes = hashes[hashes <= _threshold(self._level)]
        self._seen.update(hashes.tolist())
        while len(self._seen) > self._capacity:
            self._level += 1
            limit = int(_threshold(self._level))
            self._seen = {one for one in self._seen if one <= limit}

    def seen(self, rows_in_epoch: int | None) -> Estimate:
        """Share of the epoch's rows that were visited.

        Args:
            rows_in_epoch: rows of the data set; None when nobody knows (iterable data): then the share of the visits
                that brought a new row, which is 1 as long as nothing came twice.
        """
        whole = self._visits if rows_in_epoch is None else rows_in_epoch
        if whole <= 0:
            return Estimate(0.0, 0.0)
        kept, rate = len(self._seen), 2.0**-self._level
        return Estimate(min(kept / rate / whole, 1.0), math.sqrt(kept * (1 - rate)) / rate / whole)

    def state_dict(self) -> dict[str, Any]:
        """What continues the epoch: JSON values, the same on every rank; at most 0.7 MB of text at the default."""
        hashes = np.array(sorted(self._seen), dtype="<u8")
        packed = hashes.tobytes()
        return {
            "capacity": self._capacity,
            "level": self._level,
            "visits": self._visits,
            "rows": len(hashes),
            "hashes": base64.b64encode(packed).decode("ascii"),
            "crc": zlib.crc32(packed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the capacity that it was made with.

        Raises:
            ValueError: it is damaged; nothing has changed then.
        """
        try:
            capacity, level, visits, rows = (int(state[key]) for key in ("capacity", "level", "visits", "rows"))
            packed = base64.b64decode(str(state["hashes"]), validate=True)
            crc = int(state["crc"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise ValueError(
                f"the coverage in the checkpoint cannot be read ({error}): start its epoch again"
            ) from error
        lengths = (rows * 8, rows * 8 + (rows + 7) // 8)  # older versions wrote a bit more for each row
        sane = capacity >= 2 and 0 <= level < 64 and 0 <= rows <= min(capacity, visits)
        if not sane or len(packed) not in lengths or zlib.crc32(packed) != crc:
            raise ValueError("the coverage in the checkpoint is damaged (its checksum differs): start its epoch again")
        hashes = np.frombuffer(packed, dtype="<u8", count=rows)
        self._capacity, self._level, self._visits = capacity, level, visits
        self._seen = set(hashes.tolist())


def epoch_is_over(visits: int, step_rows: int, rows_in_epoch: int, ranks: int) -> bool:
    """Whether a step of ``step_rows`` rows (all ranks) belongs to the next epoch, for data that does not say so.

    Samplers end an epoch early (``drop_last``) or fill it up so that every rank has as many rows, with fewer than one
    row per rank. A sampler that fills up to a whole global batch must say where its epochs begin.
    """
    return visits + step_rows > rows_in_epoch + ranks - 1


def last_of_epoch(per_rank: Sequence[Ids], epoch: EpochCoverage, rows_in_epoch: int, droppable: int) -> int:
    """How many rows of each rank belong to the old epoch, in a step that an epoch ends in and the next begins.

    A sharded epoch has ceil(n / N) rows per rank, or up to ``droppable`` fewer (``drop_last``): among those the first
    row that the epoch has seen already is the next one's.

    Args:
        per_rank: each rank's rows of the step, in the order in which it took them.
        epoch: of the rows before them.
        droppable: rows of a rank that an epoch may leave out at its end.
    """
    ranks = len(per_rank)
    most = -(-max(0, rows_in_epoch - epoch.visits) // ranks)
    least = max(0, most - droppable)
    held = np.zeros(most - least, dtype=bool)
    for ids in per_rank:
        again = epoch.holds(ids[least:most])
        held[: len(again)] |= again
    return least + (int(np.argmax(held)) if held.any() else most - least)


def expected_coverage(ranks: int) -> float:
    """Share of the epoch that is seen when each rank takes its share of a permutation of its own.

    Each of N ranks takes 1/N of the rows of its own, independent permutation: a row is missed by one rank with
    probability 1 - 1/N and by all with (1 - 1/N)^N. Seen: 1 - (1 - 1/N)^N, 0.684 for N = 4, and 1 - 1/e in the limit.
    """
    return 1.0 - (1.0 - 1.0 / ranks) ** ranks


def _threshold(level: int) -> np.uint64:
    """The largest hash that starts with ``level`` zero bits."""
    limit: np.uint64 = np.uint64((1 << (64 - level)) - 1)
    return limit
