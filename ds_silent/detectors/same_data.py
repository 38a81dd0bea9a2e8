"""Ranks that read the same data set, each in an order of its own, as where a DistributedSampler is missing.

No two ranks need hold the same row at one step: that is :mod:`ds_silent.detectors.same_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.order import TOLERATED_BY_CONTENT
from ds_silent.detectors.sequential import Array
from ds_silent.distributed.parts import parts_of_numbers
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, Severity, StepRecord
from ds_silent.text import named

OVERLAP, SELDOM = 32, 4.0  # rows that each other rank had taken; times as rare on the own rank
CONFIRMED = 8  # such rows, of ranks that hold the same data set as far as it can be read
SAME_DATA = 0.7  # of the repeats that ranks with the same data have; the rows seen first are some 64


class WholeDataTest(Detector):
    """Note ranks that each take all rows of the same data set, as far as their loaders and data sets tell.

    Code that nobody reads may give each rank other rows of it, so that this is no alarm by itself: see
    :class:`OverlapTest`, to which it is a reason to believe fewer rows, and :class:`SameRows`.

    Note also ranks that hold other rows each, of which a sampler deals them a share: rows that were split before.
    """

    key = "whole_data"
    stored = ("noted",)

    def __init__(self) -> None:
        self.groups: tuple[tuple[int, ...], ...] = ()  # of those that do so, at the newest step, the largest first
        self.all_unlike = False  # it is known of every rank what it holds, and no two hold the same
        self._noted = False

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes, self.groups, self.all_unlike, found = (), (), False, evidence.whole_data
        if found is None:
            return []
        data, order = np.maximum(found.T, 0.0)
        if not self._noted and (found[:, 0] < 0.0).all() and (found[:, 0] != found[0, 0]).any():
            self._note_dealt_again(record)
        if evidence.dealt != "unknown":
            return []
        self.groups = _alike(data)
        self.all_unlike = not self.groups and bool(data.all())
        ranks = tuple(sorted(chain(*self.groups)))
        ordered = bool(order[data != 0.0].all())  # it is known in which order each rank takes them
        if ranks and ordered and not self._noted and not any(one.kind == "duplicate-data" for one in before):
            self._noted = True
            same = tuple(sorted(chain(*_alike(data * 2.0**24 + order))))  # of 24 bits each
            first, *others = (named(group, record.world_size) for group in self.groups)
            in_order = f" {named(same, record.world_size).capitalize()} take them in the same order." if same else ""
            message = (
                f"{first.capitalize()} take all rows of the same data set"
                f"{''.join(f', {other} of another' for other in others)}, as far as loaders and attributes of the data "
                f"sets tell: {_several_times(len(self.groups[0]))}{in_order} The rows themselves were not seen to be "
                "the same, as where they are augmented at random."
            )
            remedy = f"{_GIVE_A_SAMPLER}, or if your code gives each rank other rows of it."
            self.notes = (Event(record.step, "duplicate-data", "info", ranks, "loader", None, None, message, remedy),)
        return []

    def _note_dealt_again(self, record: StepRecord) -> None:
        """Note data sets that were split before a sampler splits them, or that hold their rows in other orders."""
        self._noted, ranks = True, record.world_size
        message = (
            f"The data sets of the ranks hold other rows, or the same in another order, as far as their attributes "
            f"tell, and the sampler gives each rank one of {ranks} shares of its own: where the data were split by "
            f"rank before, an epoch trains 1 of {ranks} rows, and no rank sees another's."
        )
        remedy = (
            "Split the rows once: leave out rows[rank::ranks], or the sampler, which accelerate, Lightning and a "
            "Trainer bring along. Make, list and shuffle them alike on all ranks. Do nothing if each rank is meant to "
            "draw from its own."
        )
        self.notes = (Event(record.step, "low-coverage", "info", (), "loader", None, None, message, remedy),)


def _alike(hashes: Array) -> tuple[tuple[int, ...], ...]:
    """Group the ranks whose hash, of (N,), is another rank's, too; 0 is none."""
    parts = parts_of_numbers(hashes.astype(np.int64))
    return tuple(part for part in parts if len(part) > 1 and hashes[part[0]])


def _several_times(times: int) -> str:
    return f"there is no DistributedSampler, and an epoch takes each row {times} times."


_GIVE_A_SAMPLER = (
    "Give the DataLoader a DistributedSampler, and call its set_epoch(epoch) before each epoch. Do nothing if each "
    "rank is meant to read all data in an order of its own"
)


class OverlapTest(Detector):
    """Tell of ranks that read the same data, each in an order of its own, where nobody knows how long a pass is.

    A note; a warning where each rank's pass takes all rows, as without a DistributedSampler: its sampler says so of one
    rank, and the rows come again as they do then. No two ranks need share a row at one step. Rows that come again in
    the first pass come from another rank then, and seldom from their own. Rows dealt anew at random, drawn with
    replacement, or held several times by the data come again on their own rank as often as on each other one.
    """

    key = "overlap"
    stored = ("before", "own", "others", "over")

    def __init__(self, whole: WholeDataTest) -> None:
        """``whole`` knows whether ranks hold the same data set, where that can be read: then fewer rows are enough."""
        self._whole = whole
        self._before = self._own = self._others = 0.0  # rows that had come before: up to the last step, and by whom
        self._over = False
        self._shared: Array = np.zeros(1)  # (N,) rows of each rank that another one has taken, too

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes, passes, share = (), evidence.passes, record.coverage.repeated
        if self._over or passes is None or share is None or evidence.coverage is not None or evidence.dealt == "random":
            return []
        again, others = share * sum(passes.taken), len(passes.taken) - 1
        new, self._before = again - self._before, again
        within = min(new, float(sum(evidence.own_repeats or ())))  # those of this observation are in it, too
        own = max(new * (passes.again or 0.0), within)
        self._shared = self._shared + (0.0 if passes.shared is None else passes.shared)
        self._own, self._others = self._own + own, self._others + new - own
        if new < -0.5 or not others or any(finding.kind == "duplicate-data" for finding in before):
            self._over = True  # a pass has ended, or more is known
        elif self._is_sure(share, others):
            self._over, ranks = True, self._sharing(record.world_size)
            some = len(ranks) < record.world_size
            message = (
                f"Ranks read the same data{f', {named(ranks)} alone' * some}: {share:.0%} of the rows so far had been "
                f"taken before, {self._others:.0f} by another rank and {self._own:.0f} by the same."
            )
            meant = "these ranks are meant to share a source, each" if some else "each rank is meant to read all data"
            remedy = (
                f"Do nothing if {meant} in an order of its own. Else give each rank files "
                "or rows of its own (files[rank::world_size], split_dataset_by_node)."
            )
            severity: Severity = "info"
            known = evidence.pass_rows if 0 in ranks and not self._whole.all_unlike else None  # the first rank's
            taken, groups = [passes.taken[rank] for rank in ranks], self._whole.groups
            if groups or again > SAME_DATA * _repeats_of_all(known, taken):
                severity = "warning"
                whose = f"The loader of each of {named(ranks)} shuffles" if some else "Each rank's loader shuffles"
                message += f" {whose} all rows: {_several_times(len((groups or (ranks,))[0]))}"
                remedy = remedy if some else f"{_GIVE_A_SAMPLER}."
            note = Event(record.step, "duplicate-data", severity, ranks, "loader", share, None, message, remedy)
            self.notes = (note,)
        return []

    def _is_sure(self, share: float, others: int) -> bool:
        """Tell whether rows come again from other ranks alone; ``share``: of all rows, those that have come again."""
        enough = self._others >= (CONFIRMED if self._whole.groups else OVERLAP) * others
        enough &= share >= TOLERATED_BY_CONTENT or bool(self._whole.groups)
        return enough and self._own <= self._others / others / SELDOM

    def _sharing(self, ranks: int) -> tuple[int, ...]:
        """Return the ranks that share rows with another one; all where nobody knows."""
        found = tuple(np.flatnonzero(self._shared > TOLERATED_BY_CONTENT * self._shared.max()).tolist())
        return found if len(found) > 1 else tuple(range(ranks))


def _repeats_of_all(rows: int | None, taken: Sequence[int]) -> float:
    """Return how many rows come again where each rank takes so many of the same ``rows``, in an order of its own."""
    if not rows:
        return math.inf
    shares = [min(1.0, count / rows) for count in taken]
    return sum(shares) * rows - rows * (1.0 - math.prod(1.0 - share for share in shares))
