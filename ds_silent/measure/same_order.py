"""Whether the rows come in the order of an earlier epoch: what a sampler does that nobody tells of a new epoch.

    order = SameOrder()
    order.step(ids, rows_in_epoch=1000, ranks=4, begun=True)     # one rank's rows, one observation after the other

The first rows of the run are kept, 64 or as many as come before the first of them comes again. Where the same rows
follow in the same order, a fresh shuffle of n rows would have had the chance 1 / (n (n - 1) ... (n - L + 1)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ds_silent.exchange.row_ids import Ids

WINDOW = 64
FEWEST = 8
"""Rows of a rank in a pass, where nobody knows how many an epoch has."""


@dataclass(frozen=True)
class OrderAgain:
    """What an observation says of it."""

    again: bool
    log_odds: float  # against chance, over all passes that were alike
    rows: int  # of all ranks, from one pass to the next
    shuffled: bool  # the rows are not in the order of their ids
    promised: bool = True  # a sampler says that it shuffles them


class SameOrder:
    """Follows one rank's rows; a resume begins anew."""

    def __init__(self) -> None:
        self._first: Ids = np.empty(0, np.int64)
        self._whole = False  # nothing is added to _first any more
        self._tail: Ids = np.empty(0, np.int64)  # rows that may be the beginning of a pass
        self._place, self._last = 0, 0  # rows up to here; where the last pass began
        self._alike, self._odds = 0, 0.0
        self._begun = False

    def step(self, ids: Ids, rows_in_epoch: int | None, ranks: int, begun: bool) -> OrderAgain | None:
        """Take in one rank's rows of an observation.

        Args:
            ids: int64 (rows,), in the order in which they were taken.
            begun: the loader was seen to begin anew with one of them.

        Returns:
            None where nothing is known yet, or nothing new.
        """
        self._begun = (self._begun or begun) and len(self._first) > 0
        while not self._whole and len(ids):
            ids = self._collect(ids, rows_in_epoch, ranks)
        if not self._whole:
            return None
        length, told = len(self._first), None
        stream = np.concatenate([self._tail, ids])
        start = self._place - len(self._tail)
        for place in np.flatnonzero(stream[: max(0, len(stream) - length + 1)] == self._first[0]).tolist():
            again = bool(np.array_equal(stream[place : place + length], self._first))
            told = self._passed(again, start + place, rows_in_epoch, ranks) or told
        self._place += len(ids)
        self._tail = stream[max(0, len(stream) - length + 1) :]
        return told

    def _collect(self, ids: Ids, rows_in_epoch: int | None, ranks: int) -> Ids:
        """The first rows of the run; returns what comes after them."""
        if not len(self._first):
            self._last, self._first = self._place, ids[:1]
            self._place += 1
            return ids[1:]
        room = ids[: WINDOW - len(self._first)]
        again = np.flatnonzero(room == self._first[0])
        end = int(again[0]) if len(again) else len(room)
        self._first = np.concatenate([self._first, room[:end]])
        self._place += end
        if len(again) and not self._is_pass(self._place, rows_in_epoch, ranks):
            self._first = self._first[:0]  # a row that the data hold twice is no beginning to know a pass by
        self._whole = len(self._first) == WINDOW or (bool(len(again)) and len(self._first) > 0)
        return ids[end:]

    def _is_pass(self, place: int, rows_in_epoch: int | None, ranks: int) -> bool:
        """Whether a pass over the data may have ended between the last one's beginning and this place."""
        if rows_in_epoch is None:
            return self._begun or place - self._last >= FEWEST
        return self._begun or 2 * (place - self._last) * ranks >= rows_in_epoch

    def _passed(self, again: bool, place: int, rows_in_epoch: int | None, ranks: int) -> OrderAgain | None:
        if not self._is_pass(place, rows_in_epoch, ranks):
            return None  # rows that come again within an epoch: not the order is at fault
        rows, length = (place - self._last) * ranks, len(self._first)
        self._last, self._begun = place, False
        shuffled = bool((np.diff(self._first) < 0).any())
        if not again:
            self._alike, self._odds = 0, 0.0
            return OrderAgain(False, 0.0, rows, shuffled)
        of = max(rows_in_epoch or rows, length)
        self._alike += 1
        self._odds += sum(math.log(of - k) for k in range(length))
        # a pass that was broken off early may have been a trial before the training
        whole = rows_in_epoch is not None and 2 * rows >= rows_in_epoch
        return OrderAgain(True, self._odds, rows, shuffled) if whole or self._alike > 1 else None
