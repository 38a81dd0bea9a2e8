"""Rows that come again: right behind each other, beside what a rank is dealt, or in the order of an earlier epoch."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids
from ds_silent.maths.mixing import mix64
from ds_silent.measure.coverage import EpochCoverage
from ds_silent.measure.evidence import CutPasses, OrderAgain

REGISTERS = 64
BEYOND = 1.25  # times the rows that were dealt: if as many different ones come, some are none of the data
STUCK = 16  # batches of the other ranks; a rank's own count once for twice as many, see batch_rows
_POWERS = np.ldexp(1.0, -np.arange(64)).astype(np.float32)
_BIAS = 0.709  # of 64 registers (Flajolet et al., HyperLogLog, 2007)


class RecentRows:
    """Remember each rank's newest rows, 8 bytes per row, which a resume forgets: that costs one observation. And 64
    bytes per rank, from which the number of its different rows follows, to about 13 %.
    """

    def __init__(self) -> None:
        self.window: tuple[int, ...] = ()  # rows of each rank that are remembered, the newest observation's among them
        self._held: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._registers: npt.NDArray[np.uint8] = np.empty((0, REGISTERS), dtype=np.uint8)
        self._taken: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def repeats(self, values: Ids, owners: Ids, ranks: int) -> tuple[int, ...]:
        """Count, of each of N ``ranks``, the rows that it had taken before: among these, or in the observation before.

        Args:
            values: of all ranks, int64 (M,), the rows since the last observation, each rank's in their order.
            owners: the rank of each.
        """
        ranks_of = mix64(owners.astype(np.uint64))
        keys = mix64(np.ascontiguousarray(values).view(np.uint64) ^ ranks_of)  # another rank's visit is no repeat
        again = np.isin(keys, self._held)
        later = np.ones(len(keys), dtype=bool)  # visits within this observation
        later[np.unique(keys, return_index=True)[1]] = False
        again |= later
        self._held = keys
        rows = np.bincount(owners, minlength=ranks)
        if len(self._registers) != ranks:
            self._registers = np.zeros((ranks, REGISTERS), dtype=np.uint8)
            self._counts, self._taken = (np.zeros(ranks, dtype=np.int64) for _ in range(2))
        self._taken = self._taken + rows
        self.window = tuple((self._counts + rows).tolist())
        self._counts = rows
        self._note(keys, owners)
        return tuple(map(int, np.bincount(owners, weights=again, minlength=ranks)))

    def _note(self, keys: npt.NDArray[np.uint64], owners: Ids) -> None:
        register = (keys & np.uint64(REGISTERS - 1)).astype(np.int64)
        _, exponent = np.frexp((keys >> np.uint64(11)).astype(np.float64))  # exactly: 53 bits
        zeros = (53 - exponent + 1).astype(np.uint8)  # leading ones of them, from 1
        np.maximum.at(self._registers, (owners, register), zeros)

    @property
    def distinct(self) -> tuple[float, ...]:
        """Estimate it of each rank, of the rows that were sent."""
        registers = self._registers
        estimate = _BIAS * REGISTERS**2 / _POWERS[registers].sum(1)
        empty = (registers == 0).sum(1)
        few = (estimate <= 2.5 * REGISTERS) & (empty > 0)
        counted = REGISTERS * np.log(REGISTERS / np.maximum(empty, 1))
        return tuple(np.where(few, counted, estimate).tolist())

    @property
    def taken(self) -> tuple[int, ...]:
        """Count each rank's rows so far, of those that were sent."""
        return tuple(self._taken.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values: how many rows each rank has had, and how many different ones."""
        distinct = base64.b64encode(zlib.compress(self._registers.tobytes())).decode("ascii")
        return {"ranks": len(self._registers), "distinct": distinct, "taken": list(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a damaged one raises a ValueError."""
        try:
            packed = zlib.decompress(base64.b64decode(state["distinct"], validate=True))
            registers = np.frombuffer(packed, dtype=np.uint8).reshape(int(state["ranks"]), REGISTERS)
            taken = np.array(state.get("taken", [0] * len(registers)), dtype=np.int64).reshape(len(registers))
        except (TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"the number of each rank's rows in the checkpoint cannot be read ({error})") from error
        self._registers, self._counts = registers.copy(), np.zeros(len(registers), dtype=np.int64)
        self._taken = taken


WINDOW = 64
FEWEST = 8
"""Rows of a rank in a pass, where nobody knows how many an epoch has."""


class SameOrder:
    """Tell whether one rank's rows come in the order of an earlier epoch, as of a sampler nobody tells of a new one.

    The first rows of the run are kept, 64 or as many as come before the first of them comes again. Where the same rows
    follow in the same order, a fresh shuffle of n rows would have had the chance 1 / (n (n - 1) ... (n - L + 1)). A
    resume begins anew.
    """

    def __init__(self) -> None:
        self._first: Ids = np.empty(0, np.int64)
        self._whole = False  # nothing is added to _first any more
        self._tail: Ids = np.empty(0, np.int64)  # rows that may be the beginning of a pass
        self._place, self._last = 0, 0  # rows up to here; where the last pass began
        self._alike, self._odds = 0, 0.0
        self._begun = False
        self.cut = self.cut_rows = 0  # passes that were broken off before they came again, rows of the newest

    def begins_with(self, row: int) -> bool:
        """Tell whether the first row of the run is this one."""
        return len(self._first) > 0 and int(self._first[0]) == row

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
        """Collect the first rows of the run; return what comes after them."""
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
        """Tell whether a pass over the data may have ended between the last one's beginning and this place."""
        rows = place - self._last
        return self._begun or (rows >= FEWEST if rows_in_epoch is None else 2 * rows * ranks >= rows_in_epoch)

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
        # a pass that was broken off may have been a trial before the training, as a search for its learning rate
        whole = rows_in_epoch is not None and 4 * rows >= 3 * rows_in_epoch
        if rows_in_epoch is not None and not whole:
            self.cut, self.cut_rows = self.cut + 1, rows
        return OrderAgain(True, self._odds, rows, shuffled) if whole or self._alike > 1 else None


class BrokenPasses:
    """Count passes of one rank that were broken off and begun again in the same order.

    A pass of another order begins where the first rank's loader does, with another row than the one before.
    """

    def __init__(self) -> None:
        self._newest = SameOrder()
        self._orders = 0  # before the newest, in which that came

    def step(self, ids: Ids, starts: Sequence[int], rows_in_epoch: int | None, ranks: int) -> CutPasses | None:
        """Take in the rank's rows of an observation, int64 (rows,), and the places among them where a loader began."""
        for first, end in pairwise(sorted({0, *starts, len(ids)})):
            begins = first in starts
            if begins and not self._newest.begins_with(int(ids[first])):
                self._orders += self._newest.cut > 0
                self._newest = SameOrder()
            self._newest.step(ids[first:end], rows_in_epoch, ranks, begins)
        newest = self._newest
        return CutPasses(self._orders + 1, newest.cut, newest.cut_rows) if newest.cut else None


@dataclass
class IdleRanks:
    """Find ranks that have taken no new rows while the others took ``STUCK`` batches.

    An optimizer that takes a batch several times does so on all ranks alike.
    """

    had_rows: bool = False  # every rank
    ranks: tuple[int, ...] = ()
    batches: float = 0.0  # of the others meanwhile

    def without_new_rows(self, taken: npt.NDArray[np.int64], own_rows: int) -> tuple[int, ...]:
        """Return them, if ``taken`` are the rows of each rank since the last observation."""
        idle, batches = tuple(np.flatnonzero(taken <= 0).tolist()), float(taken.max()) / max(1, own_rows)
        if not self.had_rows or len(idle) == len(taken):
            return ()
        self.ranks, self.batches = idle, batches + (self.batches if idle == self.ranks else 0.0)
        return idle if self.batches >= STUCK else ()


@dataclass
class OtherRows:
    """Find out, of the first rank, that its forwards also take rows of none of the data: a GAN's fakes, several views.

    More of its rows of an epoch are different then than were dealt to it, also where other ranks take the same.
    """

    found: bool = False
    samples: int = 0  # dealt until the last observation
    samples_before: int | None = 0  # of them, those before this epoch, or fewer; None: not known
    rows: EpochCoverage = field(default_factory=lambda: EpochCoverage(4096))  # of its forwards in this epoch

    def start_epoch(self) -> None:
        """Begin the next epoch."""
        self.samples_before = self.samples
        self.rows.start_epoch()

    def look(self, samples: int, spare: int) -> None:
        """Compare the epoch's rows with ``samples``, dealt so far; ``spare``: rows that prove nothing."""
        if self.samples_before is not None:
            self.found |= self.rows.distinct > BEYOND * (samples - self.samples_before) + spare
        self.samples = samples


@dataclass
class RowsAgain:
    """Count rows that the script takes once more by itself, beside what it is dealt: a replay, an adaptation.

    They are none of the epoch. A batch that comes twice, one after the other, is no replay. A script that is dealt
    nothing for ``STUCK`` batches goes over what it keeps, which is followed.
    """

    taken: int = 0  # by forwards of the first rank
    dealt: int | None = None  # to it
    idle: int = 0  # rows that it has taken since

    def of_step(self, taken: int, repeats: float, dealt: int, most: int) -> int:
        """Return how many of the first rank's rows since the last observation were more than it was dealt.

        Args:
            taken: since the last observation.
            repeats: of them, those that it had taken just before.
            dealt: so far.
            most: rows that it may take while it is dealt nothing.
        """
        if self.dealt is None:  # what a run that goes on had taken before is not known
            self.taken = max(0, dealt - taken)
        excess = self.taken + taken - dealt
        self.idle = self.idle + taken if dealt == self.dealt else 0
        self.taken, self.dealt = min(self.taken + taken, dealt), dealt
        follows = self.idle > most or 2 * repeats > excess
        return 0 if follows else min(taken, max(0, excess))
