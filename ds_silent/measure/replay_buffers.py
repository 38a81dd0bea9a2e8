"""Rows that a script trains several times from a buffer of its own, as PPO does, before the next ones are dealt.

buffers = ReplayBuffers()
once, kept = buffers.step(sent, own_rows, walk.given, rows_in_epoch, samples)   # without rows that are trained again

A buffer is what the first rank's loader has given at once: the rows of two steps at least, and less than an epoch.
While it gives no more, every rank goes over its buffer in passes, and in each of them a row comes once. A row that
comes twice in one pass is no part of this, nor is a batch that is trained twice: those are followed as any row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids, StepIds

FEWEST_STEPS = 2  # of a pass: else a buffer is a batch, which may come twice by mistake
MOST_ROWS = 1 << 17  # of all ranks' buffers, of those that are sent: more are not remembered
MOST_PASSES = 32  # a script that goes on for longer has lost its loader
WHOLE_EPOCH = 0.9  # of the rows: a script that keeps its batches goes over them in epochs


class ReplayBuffers:
    """Follow every rank's passes over its buffer. A resume forgets the buffer that is under way.

    Attributes:
        rounds: how often the rows of a buffer were trained that the newest observation ends, on all ranks alike; 0:
            none ends, or no buffer was ever trained twice.
        left: rows of a second pass that the newest observation breaks off, where no buffer was ever trained twice: no
            design is in that.
        counted: rows trained once more that the framework's number of samples holds.
    """

    def __init__(self) -> None:
        self.rounds, self.counted = 0, 0
        self.left: Ids = np.empty(0, np.int64)
        self._given = self._samples = 0
        self._several = False  # a buffer was trained twice, wholly
        self._begin(0, 0)

    def resume(self, counted: int) -> None:
        """Forget the buffer under way; ``counted`` before."""
        self.counted = counted
        self._begin(0, 0)

    def _begin(self, size: int, ranks: int) -> None:
        self._size, self._step, self._length = size, 0, size  # rows of each rank: of the buffer, a step, a pass
        self._taken = np.zeros(ranks, np.int64)  # by each rank since it began
        self._passes: list[_Passes] = []  # of each rank, as soon as the rows may be a buffer's
        self._doubtful: list[Ids] = []

    def step(
        self,
        sent: StepIds,
        own_rows: int,
        given: Sequence[tuple[int, int]],
        rows_in_epoch: int | None,
        samples: int | None,
    ) -> tuple[StepIds, int]:
        """Leave out what is trained once more of an observation's rows; return the rest, and how many rows those are.

        Args:
            own_rows: of each rank in the measured step.
            given: see :class:`ds_silent.capture.loaders.Walk`.
            samples: of all ranks so far, as the framework counts them.
        """
        again, ranks = np.zeros(len(sent.values), dtype=bool), len(sent.taken)
        self.rounds, self.left = 0, np.empty(0, np.int64)
        if not given or len(self._taken) != ranks:
            self._begin(0, ranks)
        self._taken += sent.taken - sent.looked
        cuts = [(0, 0)]
        for place, rows in given:
            if rows > self._given:
                cuts.append((place, rows - self._given))
            self._given = rows
        for (first, size), (end, _) in pairwise([*cuts, (int(sent.looked.max()), 0)]):
            if size:
                self._end()
                self._begin(size, ranks)
            self._step = max(self._step, own_rows)
            if self._may_be_one(ranks, rows_in_epoch, sent.rate):
                part = np.flatnonzero((sent.places >= first) & (sent.places < end))
                again[part] = self._follow(sent.values[part], sent.owners[part], sent.places[part] - first)
                self._doubtful = self._doubtful if self._several else [*self._doubtful, sent.values[part][again[part]]]
            self._taken += np.clip(sent.looked, first, end) - first
            if self._doubtful and int(self._taken.min()) >= 2 * self._length:
                self._decide(ranks, sent.rate)
        kept = _rows_in(again, sent)
        if samples is not None and samples - self._samples >= int(sent.taken.sum()):
            self.counted += kept
        self._samples = samples or 0
        if not kept:
            return sent, 0
        return replace(sent, values=sent.values[~again], owners=sent.owners[~again], places=sent.places[~again]), kept

    def _may_be_one(self, ranks: int, rows_in_epoch: int | None, rate: float) -> bool:
        all_rows = self._size * ranks
        whole = rows_in_epoch is not None and all_rows >= WHOLE_EPOCH * rows_in_epoch
        return 0 < FEWEST_STEPS * self._step <= self._size and all_rows * rate <= MOST_ROWS and not whole

    def _follow(self, values: Ids, owners: Ids, places: Ids) -> npt.NDArray[np.bool_]:
        again = np.zeros(len(values), dtype=bool)
        self._passes = self._passes or [_Passes() for _ in self._taken]
        bounds = np.searchsorted(owners, np.arange(len(self._passes) + 1)).tolist()
        whole = self._size // self._step * self._step  # where the last rows, too few for a step, are left out
        for rank, (first, end) in enumerate(pairwise(bounds)):
            own, place = values[first:end], places[first:end] + self._taken[rank]
            if rank == 0 and whole < self._length:
                known = self._passes[0].rows
                behind = own[(place >= whole) & (place < self._size)].tolist()
                known = known.union(own[place < whole].tolist())
                self._length = whole if any(value in known for value in behind) else self._size
            again[first:end] = self._passes[rank].take(own, place, self._length)
        return again

    def _decide(self, ranks: int, rate: float) -> None:
        """Look, behind a second pass, whether it was one: less than a step's rows of it may be others."""
        if 2 * sum(map(len, self._doubtful)) >= self._length * ranks * rate:
            self._several, self._doubtful = True, []
        else:
            self._end()
            self._begin(0, ranks)

    def _end(self) -> None:
        """End the buffer: what is left of a second pass may be a mistake, or a script that stops early."""
        self.left = np.concatenate([self.left, *self._doubtful])
        follows = self._several and bool(self._passes) and bool(self._passes[0].rows)
        if follows and len(set((self._taken // self._length).tolist())) == 1:
            self.rounds = max(self.rounds, int(self._taken[0] // self._length))


class _Passes:
    """Follow one rank's passes over its buffer."""

    def __init__(self) -> None:
        self.rows: set[int] = set()  # of the buffer
        self._now: set[int] = set()  # of the pass under way
        self._number = 0  # of that, from 0

    def take(self, values: Ids, places: Ids, length: int) -> npt.NDArray[np.bool_]:
        """Tell which of these rows are of a later pass than the first, and come in it once."""
        again = np.zeros(len(values), dtype=bool)
        for number, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            if place // length != self._number:
                self._number, self._now = place // length, set()
            again[number] = 0 < self._number < MOST_PASSES and value in self.rows and value not in self._now
            self._now.add(value)
            self.rows.add(value)
        return again


def _rows_in(some: npt.NDArray[np.bool_], sent: StepIds) -> int:
    """Count these of an observation's rows, sent or not."""
    return round(float(some.mean()) * int(sent.looked.sum())) if len(some) else 0
