"""Follow the rows that the ranks take: the share of the epoch, who had them before, and whether they come again.

rows = RowTracker()
coverage, evidence = row_evidence(gathered, rows, context)      # on the writing rank, in the order of the steps

With many ranks only a sample of the rows is sent (:mod:`ds_silent.exchange.row_ids`): a row is always in it or never.
Counts of rows in the whole training are then estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_silent.capture.loaders import Walk
from ds_silent.exchange.observation import Gathered
from ds_silent.exchange.row_ids import Ids, Sampling, StepIds, unpack_ids
from ds_silent.measure.coverage import (
    EpochCoverage,
    begin_alike,
    epoch_is_over,
    last_of_epoch,
    shared_rows,
    smallest_hashes,
)
from ds_silent.measure.deal import DealFollower
from ds_silent.measure.evidence import Coverage, CutPasses, Evidence, OrderAgain, OwnPasses
from ds_silent.measure.record import Context, evidence_of
from ds_silent.measure.replay_buffers import ReplayBuffers
from ds_silent.measure.row_history import STUCK, BrokenPasses, IdleRanks, OtherRows, RecentRows, RowsAgain, SameOrder
from ds_silent.records import CoverageStats, Severity


class RowsOfStep(NamedTuple):
    """Hold what the ids of one observation say. Counts per rank and pair cover the sent rows only."""

    coverage: CoverageStats
    evidence: Evidence  # only its part about rows


WALK_UNKNOWN = Walk()
FOLLOWED = 8  # ranks whose passes are looked at


class RowTracker:
    """Follow the rows of the current epoch over all ranks, in constant memory; ``deal``: how they come to the ranks."""

    def __init__(self) -> None:
        self.deal = DealFollower()
        self._epoch = EpochCoverage()
        self._recent = RecentRows()
        self._order, self._passes = SameOrder(), list[BrokenPasses]()
        self._level = 0  # sampling level of the epoch's rows
        self._partial = False  # rows were missed in this epoch: shares would be wrong
        self._first: npt.NDArray[np.uint64] = np.empty(0, np.uint64)  # what the epoch began with: the smallest hashes
        self._resumed = False  # resumed, and the loader has not begun since
        self._short = False  # a pass began before the last was over: the script wants it so
        self._before_anew = 0  # visits of this epoch when a resumed run began its pass anew
        self._idle, self._others = IdleRanks(), OtherRows()
        self._again, self.buffers = RowsAgain(), ReplayBuffers()

    def step(
        self,
        ids: Tensor,
        own_rows: int,
        rows_in_epoch: int | None,
        walk: Walk = WALK_UNKNOWN,
        sampling: Sampling | None = None,
        micro_batches: int = 0,
        samples: int | None = None,
    ) -> RowsOfStep:
        """Take in what all ranks sent: (N, n) packed ids of the rows since the last observation.

        Args:
            own_rows: rows per rank of the measured step itself, the last ones sent.
            rows_in_epoch: None if unknown: then ``repeated`` is a share of the visits, and the others are None.
            walk: how the first rank's rows came to it.
            sampling: which rows are sent; None: all.
            micro_batches: of a step on each rank; 0 if unknown.
            samples: rows that were dealt to all ranks so far, as far as loaders say; None if unknown.

        Returns:
            what is known where a rank sent no ids, too.
        """
        sent, level = unpack_ids(ids, sampling), 0 if sampling is None else sampling.level
        rows_in_epoch = None if self._others.found else rows_in_epoch
        if level != self._level:  # the number of ranks changed since the checkpoint: other rows are sampled
            self._epoch.start_epoch()
            self._partial, self._level = self._partial or self._resumed, level
        if int(sent.taken.min()) <= 0:
            self._partial |= not walk.repeated or bool(sent.taken.any())
            stuck, same = self._idle.without_new_rows(sent.taken, own_rows), walk.batch_again and not sent.taken.any()
            none = self._idle.had_rows and not sent.taken.any()
            evidence = Evidence(stuck=stuck, batch_again=same, independent=not (same and walk.watched), no_rows=none)
            return RowsOfStep(CoverageStats(), evidence)
        self._idle = IdleRanks(had_rows=True)
        whole, (sent, own_rows) = own_rows, one_view(sent, own_rows, micro_batches)
        if own_rows < whole:
            walk = replace(walk, starts=tuple(start * own_rows // whole for start in walk.starts), given=())
        ranks, rate = len(sent.taken), sent.rate
        of_step = sent.places >= (sent.looked - own_rows)[sent.owners]  # not of steps that were not measured
        rows = tuple(np.bincount(sent.owners[of_step], minlength=ranks).tolist())
        once, kept = self.buffers.step(sent, own_rows, walk.given, rows_in_epoch, samples)
        repeats = self._recent.repeats(once.values, once.owners, ranks)
        self.deal.rows.step(once.values, once.owners, ranks)
        recent, dealt = self._recent, self.deal.rows
        passes = OwnPasses(recent.window, recent.distinct, dealt.own_again, recent.taken, dealt.shared, dealt.trails)
        self._partial |= not sent.complete
        order = _order_again(self._order, once, rows_in_epoch, walk)
        cut = None if rows_in_epoch is None else _cut_passes(self._passes, once, rows_in_epoch, walk)
        shared, pairs = 0, Counter[tuple[int, int]]()
        again, followed = kept, samples is not None and not walk.told
        if samples is not None and followed:
            over = rows_in_epoch is not None and self._epoch.consumed + own_rows * ranks > rows_in_epoch
            most = 0 if over else STUCK * own_rows
            soon = (repeats[0] if int(sent.taken[0]) <= own_rows else _taken_just_before(once, own_rows)) / rate
            again += ranks * self._again.of_step(int(sent.taken[0]) - kept // ranks, soon, samples // ranks, most)
        self._epoch.update(self.buffers.left, round(len(self.buffers.left) / rate))
        for begins, first, end in self._parts(sent, own_rows, rows_in_epoch, walk, again):
            part = (sent.places >= first) & (sent.places < end)
            if begins:
                self._epoch.start_epoch()
                self._partial, self._before_anew, self._first = False, 0, smallest_hashes(sent.values[part])
                self._others.start_epoch()
            each = _rows_of(sent, first, end)
            many, own_again = _with_share_of(again, each, sent)
            if own_again < many:  # else all of them are none of the epoch
                self._epoch.update(sent.values[part], many, own_again)
                if not self._others.found:
                    self._others.rows.update(sent.values[part & (sent.owners == 0)], int(each[0]))
            # a row of one rank's last epoch may be another rank's in this one
            found = shared_rows(sent.values[part & of_step], sent.owners[part & of_step])
            shared += found.count
            pairs.update({(a, b): count for a, b, count in found.pairs})
        shared, sample = round(shared / rate), None if rate == 1.0 else rate
        told = CoverageStats(shared, sampled=sample, unsent=None if sample is None else sent.unsent)
        evidence = Evidence(
            duplicates=pairs,
            rows_per_rank=rows,
            own_rows=tuple(sent.counts.tolist()),
            own_repeats=repeats,
            passes=passes,
            rows_taken=tuple(sent.taken.tolist()),
            rows_sampled=rate,
            same_order=order,
            cut_passes=cut,
        )
        if samples is not None and followed:
            self._others.look(samples // ranks, own_rows)
        if rows_in_epoch is None or self._partial or self._others.found:
            share = None if self._partial or not self._epoch.visits else max(0.0, 1.0 - self._epoch.seen(None).value)
            return RowsOfStep(replace(told, repeated=share), evidence)
        coverage = _coverage(self._epoch, rows_in_epoch, walk, rate, bool(self._before_anew))
        repeated = max(0.0, coverage.epoch - coverage.seen)
        return RowsOfStep(replace(told, seen=coverage.seen, repeated=repeated), replace(evidence, coverage=coverage))

    def _parts(
        self, sent: StepIds, own_rows: int, rows_in_epoch: int | None, walk: Walk, again: int
    ) -> Iterator[tuple[bool, int, int]]:
        """Cut the rows by epochs; yield whether an epoch begins with the part, and each rank's first and end place.

        If the loader was seen, it says where its passes begin; else the rows are counted. A script that keeps its
        batches reads the loader only once: so rows are counted there too, but a whole step must be too many.
        """
        ranks = len(sent.taken)
        starts = [start for start in walk.starts if start > 0]
        begins = 0 in walk.starts
        place, length = 0, int(sent.looked.max())
        while place < length:
            end = starts.pop(0) if starts else length
            inside = (sent.places >= place) & (sent.places < end)
            many, own_again = _with_share_of(again, _rows_of(sent, place, end), sent)
            spare = own_rows * ranks if walk.watched else 0
            visits = self._epoch.consumed - self._before_anew
            before = 0 if begins else visits - spare
            dealt = (rows_in_epoch or 0) + walk.facts.filled
            if rows_in_epoch and not begins and epoch_is_over(before, many - own_again, dealt, ranks):
                left = -(-max(0, dealt - visits) // ranks)
                old = last_of_epoch(sent.values[inside], sent.places[inside] - place, self._epoch, left, own_rows)
                if old:
                    yield False, place, place + old
                place, begins = place + old, True
                starts = [end, *starts] if end < length else starts
                most = -(-dealt // ranks)
                if end - place > most:  # more than a whole epoch is left
                    yield True, place, place + most
                    place, begins = place + most, False
                continue
            if begins and self._epoch.visits:
                begins = self._begins(sent.values[inside], own_rows * ranks, rows_in_epoch, walk)
            self._resumed &= not (walk.starts and place >= walk.starts[0])
            yield begins, place, end
            place, begins = end, True

    def _begins(self, rows: Ids, step_rows: int, rows_in_epoch: int | None, walk: Walk) -> bool:
        """Tell whether a new epoch begins with ``rows``, the first ones of the pass of a loader that has just begun.

        A script that resumes within an epoch makes its loader anew for the rest, so a pass is known by its rows: the
        rest continues the epoch. The epoch's first rows again are trained twice, unless no whole step of it was left,
        or this run breaks off its passes anyway.
        """
        visits, known = self._epoch.consumed, rows_in_epoch is not None and not self._partial
        over = not known or visits - self._before_anew + step_rows > (rows_in_epoch or 0)
        if not (self._resumed and walk.starts and len(rows)):
            self._short |= not over and visits > 2 * step_rows
            return True
        alike = begin_alike(self._first, smallest_hashes(rows))
        if not known or over or self._short:
            return alike or known
        if alike:
            self._before_anew = visits
        return False

    def state_dict(self, unsent: bool) -> dict[str, Any]:
        """Return what continues the epoch after a resume.

        ``unsent`` rows wait on the ranks: the checkpoint lacks them, so this epoch's shares are unknown afterwards.
        """
        return {
            "epoch": self._epoch.state_dict(),
            "partial": self._partial or unsent,
            "level": self._level,
            "first": self._first.tolist(),
            "short": self._short,
            "before_anew": self._before_anew,
            "mixed": self._others.found,
            "kept": self.buffers.counted,
            "deal": self.deal.state_dict(),
            "recent": self._recent.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; a damaged one raises a ValueError."""
        self._epoch.load_state_dict(state["epoch"])
        self._partial, self._resumed = bool(state["partial"]), True
        self._level = int(state["level"])
        self._first = np.array(state["first"], dtype=np.uint64)
        self._short, self._before_anew = bool(state["short"]), int(state["before_anew"])
        self._others = OtherRows(found=bool(state.get("mixed", False)), samples_before=None)
        self._again = RowsAgain()
        self.buffers.resume(int(state.get("kept", 0)))
        self._order, self._passes = SameOrder(), list[BrokenPasses]()
        self.deal.load_state_dict(state["deal"])
        self._recent.load_state_dict(state["recent"])


def row_evidence(gathered: Gathered, tracker: RowTracker, context: Context) -> tuple[CoverageStats, Evidence]:
    """Return the record's coverage, and what detectors need besides the record."""
    coverage, of_rows, walk, rows_in_epoch = CoverageStats(), Evidence(), context.walk, context.rows_in_epoch
    # all ranks' scripts have thrown the gradient away, and nothing is trained on its rows
    left_out = context.update_skipped and not context.skipped and not bool(gathered.code.hyper_parameters.any())
    if gathered.ids.numel():
        backwards = set(gathered.objective.count.tolist())
        micro_batches = int(backwards.pop()) if len(backwards) == 1 else 0
        rows, comes = (int(context.batch), rows_in_epoch), replace(walk, repeated=walk.repeated or left_out)
        coverage, of_rows = tracker.step(gathered.ids, *rows, comes, context.sampling, micro_batches, context.samples)
    of_step = int(context.batch * gathered.ranks)
    samples = context.samples - tracker.buffers.counted
    dealt = tracker.deal.step(gathered.loss.order, walk.deal, samples, of_step, rows_in_epoch)
    if (epoch := of_rows.coverage) is not None:
        once = tracker.deal.deals_each_once(round(epoch.epoch * epoch.rows), samples)
        of_rows = replace(of_rows, coverage=replace(epoch, once=once))
    alike = 1 if walk.told and gathered.ids.numel() else walk.deal.alike
    whole = torch.stack((gathered.loss.data, gathered.loss.first_rows), 1).numpy() if gathered.loss.data.any() else None
    of_rows = replace(of_rows, rounds=tracker.buffers.rounds)
    of_rows = replace(of_rows, dealt=dealt.dealt, pass_rows=walk.deal.pass_rows, passes_alike=alike, whole_data=whole)
    return coverage, evidence_of(gathered, replace(of_rows, left_out=left_out), context)


def _coverage(epoch: EpochCoverage, rows_in_epoch: int, walk: Walk, rate: float, begun_anew: bool) -> Coverage:
    """Return how much of its rows an epoch has seen; ``begun_anew``: a resumed run began its pass from the start."""
    seen, consumed = epoch.seen(rows_in_epoch), epoch.consumed / rows_in_epoch
    unfilled = max(0.0, min(consumed, 1.0) - seen.value)  # without healthy padding of the last batch
    anew: Severity | None = None
    if begun_anew:
        anew = "warning" if walk.facts.shuffles else "info"  # else passes may be cut, and this be the next one
    filled = walk.facts.filled / rows_in_epoch
    error = seen.standard_error
    return Coverage(consumed, seen.value, unfilled, rows_in_epoch, error, walk.told, rate, anew, filled=filled)


def one_view(sent: StepIds, own_rows: int, micro_batches: int) -> tuple[StepIds, int]:
    """Take each row of a micro-batch once where all micro-batches of all ranks hold as many rows that come again.

    So it is with the views of contrastive losses, and where a batch is forwarded once more in another order, as for
    the negatives of a triplet. Return rows as they are where that is not so, where less than a quarter comes again, or
    where a micro-batch holds one row alone.
    """
    own = sent.values[sent.owners == sent.owners[0]] if len(sent.owners) else sent.values
    if len(np.unique(own)) == len(own) > 1:  # nearly always
        return sent, own_rows
    size = own_rows // micro_batches if micro_batches else 0
    if (
        not len(own)
        or size < 4
        or own_rows % micro_batches
        or not sent.complete
        or (sent.taken % size).any()
        or sent.unsent
    ):
        return sent, own_rows
    whole, place = np.divmod(sent.places, size)
    keys = np.stack([sent.owners, whole, sent.values])
    _, first, row, views = np.unique(keys, axis=1, return_index=True, return_inverse=True, return_counts=True)
    once = np.sort(first)  # in the order in which they came
    if sent.rate < 1.0:  # of a sample: which row it is follows from where its views are
        kept = size // int(views[0])
        ordered = np.stack([place % kept, place // int(views[0])])
        number = next((own for own in ordered if (own == own[first][row.reshape(-1)]).all()), None)
        if number is None or (views != size / kept).any():
            return sent, own_rows
        number = number[once]
    else:
        _, begin, counts = np.unique(keys[:2, once], axis=1, return_index=True, return_counts=True)
        kept = int(counts[0])
        if (counts != kept).any():
            return sent, own_rows
        number = np.arange(len(once)) - np.repeat(begin, counts)
    if not 1 < kept <= 0.75 * size:
        return sent, own_rows
    places = whole[once] * kept + number
    taken, looked = (full // size * kept for full in (sent.taken, sent.looked))
    sampled = sent.sampled * kept // size if sent.rate < 1.0 else looked
    values = sent.values[once], sent.owners[once], places
    return StepIds(*values, taken, looked, sampled, sent.rate), kept * micro_batches


def _rows_of(sent: StepIds, first: int, end: int) -> Ids:
    """Count each rank's rows from one place to another, (N,), sent or not."""
    return np.minimum(sent.looked, end) - np.minimum(sent.looked, first)


def _with_share_of(again: int, rows: Ids, sent: StepIds) -> tuple[int, int]:
    """Return how many rows a part of an observation has, and how many of the observation's ``again`` fall to it."""
    many = int(rows.sum())
    return many, again * many // max(1, int(sent.looked.sum()))


def _taken_just_before(sent: StepIds, rows: int) -> int:
    """Count the first rank's rows that it had taken at most ``rows`` places before, among those that were sent."""
    own = sent.owners == 0
    values, places = sent.values[own], sent.places[own]
    order = np.lexsort((places, values))
    same = np.diff(values[order]) == 0
    return int((np.diff(places[order])[same] <= rows).sum())


def _dealt(rows_in_epoch: int, sent: StepIds) -> int:
    """Return how many of an epoch's rows are sent."""
    return max(1, round(rows_in_epoch * sent.rate))


def _order_again(known: SameOrder, sent: StepIds, rows_in_epoch: int | None, walk: Walk) -> OrderAgain | None:
    """Follow the order of the first rank's rows. A sample of rows repeats its order too."""
    dealt = None if rows_in_epoch is None else _dealt(rows_in_epoch, sent)
    found = known.step(sent.values[sent.owners == 0], dealt, len(sent.taken), bool(walk.starts))
    if found is None or not _shuffles(walk, found):
        return None
    return replace(found, rows=round(found.rows / sent.rate), promised=walk.facts.shuffles is True)


def _cut_passes(known: list[BrokenPasses], sent: StepIds, rows_in_epoch: int, walk: Walk) -> CutPasses | None:
    """Follow the orders of the first ranks' rows; return what those of them have in common that did so most.

    Rows that nobody shuffles come again in their order on a rank that has fewer of them.
    """
    ranks, found, promised = len(sent.taken), dict[int, CutPasses](), walk.facts.shuffles is True
    known += [BrokenPasses() for _ in range(len(known), min(ranks, FOLLOWED) if promised else 1)]
    for rank, passes in enumerate(known[:ranks]):
        own = sent.owners == rank
        ids, starts = sent.values[own], np.searchsorted(sent.places[own], walk.starts).tolist()
        cut = passes.step(ids, [one for one in starts if one < len(ids)], _dealt(rows_in_epoch, sent), ranks)
        if cut is not None:
            found[rank] = cut
    if not found:
        return None
    first = max(found.values())
    alone = tuple(rank for rank, cut in found.items() if cut[:2] == first[:2])
    alone = alone if len(alone) < len(known[:ranks]) else ()
    return first._replace(rows=round(first.rows / sent.rate), alone=alone, promised=promised)


def _shuffles(walk: Walk, order: OrderAgain) -> bool:
    """Tell whether a repeated order may be a fault: by the sampler, else by the script's ids, else by its set_epoch."""
    said = walk.facts.shuffles
    return (order.shuffled if walk.told else walk.facts.by_epoch) if said is None else said
