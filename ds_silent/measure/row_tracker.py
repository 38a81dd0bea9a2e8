"""Which rows the ranks took: how much of the epoch, who had them before, and whether they come again.

rows = RowTracker()
coverage, evidence = row_evidence(gathered, rows, context)      # on the writing rank, in the order of the steps

Of many ranks a sample of the rows is known, see :mod:`ds_silent.exchange.row_ids`: the same ones wherever and whenever
they come. What is counted in rows of the whole training is then an estimate.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ds_silent.capture.loaders import Walk
from ds_silent.exchange.observation import Gathered
from ds_silent.exchange.row_ids import Ids, Sampling, StepIds, unpack_ids
from ds_silent.maths.mixing import mix64
from ds_silent.measure.coverage import (
    EpochCoverage,
    begin_alike,
    epoch_is_over,
    last_of_epoch,
    shared_rows,
    smallest_hashes,
)
from ds_silent.measure.deal import DealFollower
from ds_silent.measure.evidence import Coverage, Evidence, OrderAgain, OwnPasses
from ds_silent.measure.record import Context, evidence_of
from ds_silent.records import CoverageStats


class RowsOfStep(NamedTuple):
    """What the ids of one observation say. Counts per rank and pair are of the rows that were sent."""

    coverage: CoverageStats
    evidence: Evidence  # what it says of the rows


WALK_UNKNOWN = Walk()


class RowTracker:
    """Follow the rows of the current epoch over all ranks; constant memory, see :class:`EpochCoverage`.

    Attributes:
        deal: how they come to the ranks.
    """

    def __init__(self) -> None:
        self.deal = DealFollower()
        self._epoch = EpochCoverage()
        self._recent = RecentRows()
        self._order = SameOrder()
        self._level = 0  # of the sample that the epoch was made from
        self._partial = False  # rows were missed in this epoch: shares would be wrong
        self._first: npt.NDArray[np.uint64] = np.empty(0, np.uint64)  # what the epoch began with: the smallest hashes
        self._resumed = False  # the loader has not begun since then

    def step(
        self,
        ids: Tensor,
        own_rows: int,
        rows_in_epoch: int | None,
        walk: Walk = WALK_UNKNOWN,
        sampling: Sampling | None = None,
    ) -> RowsOfStep | None:
        """Take in what all ranks sent: (N, n) packed ids of the rows since the last observation.

        Args:
            own_rows: rows per rank of the measured step itself, the last ones sent.
            rows_in_epoch: None when not known: then ``repeated`` is a share of the visits, and the others are not told.
            walk: how the first rank's rows came to it.
            sampling: which rows are sent; None: all.

        Returns:
            None when a rank sent no ids.
        """
        sent, level = unpack_ids(ids, sampling), 0 if sampling is None else sampling.level
        if level != self._level:  # another number of ranks since the checkpoint: other rows are known
            self._epoch.start_epoch()
            self._partial, self._level = self._partial or self._resumed, level
        if int(sent.taken.min()) <= 0:
            self._partial = True
            return None
        ranks, rate = len(sent.taken), sent.rate
        before = sent.looked - own_rows  # rows of steps that were not measured
        of_step = sent.places >= before[sent.owners]
        rows = tuple(np.bincount(sent.owners[of_step], minlength=ranks).tolist())
        repeats = self._recent.repeats(sent.values, sent.owners, ranks)
        self.deal.take(sent.values, sent.owners, ranks)
        passes = OwnPasses(self._recent.window, self._recent.distinct, self.deal.own_again)
        self._partial |= not sent.complete
        order = self._order_again(sent, rows_in_epoch, bool(walk.starts))
        if order is not None:
            order = replace(order, promised=walk.facts.shuffles is True) if _shuffles(walk, order) else None
        shared, pairs = 0, Counter[tuple[int, int]]()
        for begins, first, end in self._parts(sent, own_rows, rows_in_epoch, walk):
            part = (sent.places >= first) & (sent.places < end)
            if begins:
                self._epoch.start_epoch()
                self._partial, self._first = False, smallest_hashes(sent.values[part])
            self._epoch.update(sent.values[part], _rows_of(sent, first, end))
            # what a rank held in the last epoch may be another's in this one
            found = shared_rows(sent.values[part & of_step], sent.owners[part & of_step])
            shared += found.count
            pairs.update({(a, b): count for a, b, count in found.pairs})
        visits, shared = self._epoch.visits, round(shared / rate)
        sample = None if rate == 1.0 else rate
        told = CoverageStats(shared, sampled=sample, unsent=None if sample is None else sent.unsent)
        evidence = Evidence(
            duplicates=pairs,
            rows_per_rank=rows,
            own_rows=tuple(sent.counts.tolist()),
            own_repeats=repeats,
            passes=passes,
            rows_taken=sent.rows,
            rows_sampled=rate,
            same_order=order,
        )
        if rows_in_epoch is None or self._partial:
            share = None if self._partial or not visits else max(0.0, 1.0 - self._epoch.seen(None).value)
            return RowsOfStep(replace(told, repeated=share), evidence)
        seen = self._epoch.seen(rows_in_epoch)
        consumed = visits / rows_in_epoch
        repeated = max(0.0, consumed - seen.value)
        unfilled = max(0.0, min(consumed, 1.0) - seen.value)  # without what fills the last batch up, in health
        coverage = Coverage(consumed, seen.value, unfilled, rows_in_epoch, seen.standard_error, walk.told, rate)
        told = replace(told, seen=seen.value, repeated=repeated)
        return RowsOfStep(told, replace(evidence, coverage=coverage))

    def _order_again(self, sent: StepIds, rows_in_epoch: int | None, begun: bool) -> OrderAgain | None:
        """Follow the order of the first rank's rows. Those of a sample come in the same order again too."""
        known = None if rows_in_epoch is None else max(1, round(rows_in_epoch * sent.rate))
        found = self._order.step(sent.values[sent.owners == 0], known, len(sent.taken), begun)
        return None if found is None else replace(found, rows=round(found.rows / sent.rate))

    def _parts(
        self, sent: StepIds, own_rows: int, rows_in_epoch: int | None, walk: Walk
    ) -> Iterator[tuple[bool, int, int]]:
        """Cut the rows by epochs: whether one begins with this part, and from which place of each rank to which.

        Where the loader was seen, it says itself where its passes begin; else the rows are counted. A script that keeps
        its batches reads the loader once only: so rows are counted there too, but only once a whole step is too many.
        """
        ranks = len(sent.taken)
        starts = [start for start in walk.starts if start > 0]
        begins = 0 in walk.starts
        place, length = 0, int(sent.looked.max())
        while place < length:
            end = starts.pop(0) if starts else length
            inside = (sent.places >= place) & (sent.places < end)
            many = _rows_of(sent, place, end)
            spare = own_rows * ranks if walk.watched else 0
            before = 0 if begins else self._epoch.visits - spare
            if rows_in_epoch and not begins and epoch_is_over(before, many, rows_in_epoch, ranks):
                left = -(-max(0, rows_in_epoch - self._epoch.visits) // ranks)
                old = last_of_epoch(sent.values[inside], sent.places[inside] - place, self._epoch, left, own_rows)
                if old:
                    yield False, place, place + old
                place, begins = place + old, True
                starts = [end, *starts] if end < length else starts
                most = -(-rows_in_epoch // ranks)
                if end - place > most:  # more than a whole epoch is left
                    yield True, place, place + most
                    place, begins = place + most, False
                continue
            # a script that goes on within the epoch makes its loader anew for that; the pass begins with its own rows
            if begins and self._resumed and walk.starts and inside.any() and self._epoch.visits:
                begins = begin_alike(self._first, smallest_hashes(sent.values[inside]))
            self._resumed &= not (walk.starts and place >= walk.starts[0])
            yield begins, place, end
            place, begins = end, True

    def state_dict(self, unsent: bool) -> dict[str, Any]:
        """Return what continues the epoch after a resume.

        Args:
            unsent: rows of steps since the last observation wait on the ranks; a checkpoint does not hold them, so
                after a resume the shares of this epoch are not known.
        """
        return {
            "epoch": self._epoch.state_dict(),
            "partial": self._partial or unsent,
            "level": self._level,
            "first": self._first.tolist(),
            "deal": self.deal.state_dict(),
            "recent": self._recent.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: it is damaged.
        """
        self._epoch.load_state_dict(state["epoch"])
        self._partial, self._resumed = bool(state["partial"]), True
        self._level = int(state.get("level", 0))  # older versions sent all rows
        self._first = np.array(state.get("first", []), dtype=np.uint64)  # likewise
        self._order = SameOrder()
        if "deal" in state:
            self.deal.load_state_dict(state["deal"])
            self._recent.load_state_dict(state["recent"])


def row_evidence(gathered: Gathered, tracker: RowTracker, context: Context) -> tuple[CoverageStats, Evidence]:
    """Return the coverage for the record, and what the detectors need besides the record."""
    found = None
    if gathered.ids.numel():
        found = tracker.step(gathered.ids, int(context.batch), context.rows_in_epoch, context.walk, context.sampling)
    of_step = int(context.batch * gathered.ranks)
    dealt = tracker.deal.step(gathered.loss.order, context.walk.deal, context.samples, of_step, context.rows_in_epoch)
    coverage, of_rows = found or (CoverageStats(), Evidence())
    return coverage, evidence_of(gathered, replace(of_rows, dealt=dealt.dealt), context)


def _rows_of(sent: StepIds, first: int, end: int) -> int:
    """Count the rows of all ranks from one place to another, whether or not they were sent."""
    return int((np.minimum(sent.looked, end) - np.minimum(sent.looked, first)).sum())


def _shuffles(walk: Walk, order: OrderAgain) -> bool:
    """Tell whether the same order is a fault: the sampler says that it shuffles, or the ids told are shuffled."""
    said = walk.facts.shuffles
    return (walk.told and order.shuffled) if said is None else said


# -- rows that come again: right after their rank took them, in the order of an earlier epoch --------------------------

REGISTERS = 64
_POWERS = np.ldexp(1.0, -np.arange(64)).astype(np.float32)
_BIAS = 0.709  # of 64 registers (Flajolet et al., HyperLogLog, 2007)


class RecentRows:
    """Remember each rank's newest rows, 8 bytes per row, which a resume forgets: that costs one observation. And 64
    bytes per rank, from which the number of its different rows follows, to about 13 %.

    Attributes:
        window: rows of each rank that are remembered, those of the newest observation among them.
    """

    def __init__(self) -> None:
        self.window: tuple[int, ...] = ()
        self._held: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._registers: npt.NDArray[np.uint8] = np.empty((0, REGISTERS), dtype=np.uint8)

    def repeats(self, values: Ids, owners: Ids, ranks: int) -> tuple[int, ...]:
        """Count, of each of N ``ranks``, the rows that it had taken before: among these, or in the observation before.

        Args:
            values: of all ranks, int64 (M,), the rows since the last observation, each rank's in their order.
            owners: the rank of each.
        """
        ranks_of = mix64(owners.astype(np.uint64))
        keys = mix64(np.ascontiguousarray(values).view(np.uint64) ^ ranks_of)  # another rank's visit is no repeat
        again = np.isin(keys, self._held)
        new = np.ones(len(keys), dtype=bool)
        new[np.unique(keys, return_index=True)[1]] = False
        again |= new  # a later visit within this observation
        self._held = keys
        rows = np.bincount(owners, minlength=ranks)
        if len(self._registers) != ranks:
            self._registers = np.zeros((ranks, REGISTERS), dtype=np.uint8)
            self._counts = np.zeros(ranks, dtype=np.int64)
        self.window = tuple((self._counts + rows).tolist())
        self._counts = rows
        self._note(keys, owners)
        counts = np.bincount(owners, weights=again, minlength=ranks)
        return tuple(int(count) for count in counts)

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

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values: how many different rows each rank has had."""
        packed = zlib.compress(self._registers.tobytes())
        return {"ranks": len(self._registers), "distinct": base64.b64encode(packed).decode("ascii")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: it is damaged.
        """
        try:
            packed = zlib.decompress(base64.b64decode(state["distinct"], validate=True))
            registers = np.frombuffer(packed, dtype=np.uint8).reshape(int(state["ranks"]), REGISTERS)
        except (TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"the number of each rank's rows in the checkpoint cannot be read ({error})") from error
        self._registers, self._counts = registers.copy(), np.zeros(len(registers), dtype=np.int64)


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
