"""Ranks that hold the same rows, by the rows' ids.

**Where all rows are known** (:class:`SameRows`) the same batch is a fact; of a part of a batch see there.

**Where only a sample of the rows is known** (:mod:`ds_silent.exchange.row_ids`), a false-alarm rate does apply. Of a
rank's few sampled rows at one step, one that another rank has too may be chance; the same pair again and again is none.
Null hypothesis, for a pair of ranks: a row that one of them holds is among the other's with probability at most p, one
by one. Shards share no row, but for the at most one per rank that fills an epoch up; ranks that draw independently of
each other, from n rows b each, have p = b / n. An epoch is at least a step long, so p <= 1 / N; where it is known to be
shorter, p = b / n. The alternative: they share half of their rows, or all. Each row that both hold is evidence of log(1
/ 2p), each that only one holds of -log 2: the expectation of the ratio is at most 1. Evidence adds up over the steps
and never falls below 0 (a pair that has shared nothing for ``FORGET`` steps begins anew), and a pair is named at
log(mean steps between false alarms) + log(N (N - 1) / 2), for all pairs are looked at.

Health, then: the rows that fill an epoch up are at most one per rank and epoch: one of the 4 that it takes, at 1,024 to
65,536 ranks and the default rate. The power: a pair with the same rows has sent Binomial(s b, r) of them, at a rate r,
after s steps of b rows, and is named when these are K = ceil(threshold / log(1 / 2p)):

    P(named within s steps) = P(Binomial(s b, r) >= K)

16,384 ranks of 8 rows send one row in 16: K = 4 and 8 steps in the mean, 96 % within 16 steps and 99.9 % within 28.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.duplicate_data import SAME_LOSS, Pair, shared_findings
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import LONG_TRAIL, Evidence
from ds_silent.records import StepRecord

FEW, SEVERAL = 4, 4  # batches, and rows, see SameRows
RECURRING = 0.25  # share of a rank's rows that it has had before, from which rows are a few contents that recur
FORGET = 32  # measured steps without a shared row, after which a pair begins anew


class SameRows(Detector):
    """Compare the rows of the ranks, where all of them are known.

    A pair is named at once if it shares all rows, four or more. Rows that are drawn independently, as with replacement,
    are shared by chance: of b rows s with probability at most C(b, s) p^s, where p = b / n for data of n rows, n being
    at least the number of different rows that a rank has had, or the share that all pairs have shared so far. The logs
    of these add up while a pair shares half of its rows at one measured step after another; it is named at log(mean
    steps between false alarms) + log(N (N - 1) / 2). In a rank's first ``FEW`` batches n says nothing: three rows that
    are all, or eight, are enough. Where a few contents recur, as in a truth table, or an epoch is a few batches, which
    a sampler fills up, a part of a batch says nothing.
    """

    key = "pairs_before"

    def __init__(self, log_threshold: float) -> None:
        self._threshold = log_threshold
        self._pairs: dict[Pair, tuple[float, int]] = {}  # that shared half at the step before: evidence, rows in a row
        self._newest: list[Finding] = []
        self._shared = self._looked = 0.0  # rows of pairs that were not named: shared, and all

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        if evidence.batch_again:
            return self._newest
        self._newest = [] if evidence.rows_sampled < 1.0 else self._compared(record, evidence)  # ``SampledRowsTest``
        return self._newest

    def _compared(self, record: StepRecord, evidence: Evidence) -> list[Finding]:
        rows, counts, ranks = evidence.rows_per_rank, evidence.duplicates or {}, record.world_size
        limit = self._threshold + math.log(max(1.0, ranks * (ranks - 1) / 2))
        (different, taken), sure = _different_rows(evidence), set()
        usual, pairs = self._shared / max(1.0, self._looked), dict[Pair, tuple[float, int]]()
        for pair in shared_pairs(evidence):
            assert rows is not None
            if _are_context(record, pair, rows):
                continue
            (smaller, larger), shared = sorted(rows[rank] for rank in pair), counts[pair]
            chance = max(larger / max(1.0, different), usual)
            ways = math.lgamma(smaller + 1) - math.lgamma(shared + 1) - math.lgamma(smaller - shared + 1)
            gain = 0.0 if chance > RECURRING else max(0.0, -shared * math.log(chance) - ways)
            weight, in_row = self._pairs.get(pair, (0.0, 0))
            pairs[pair] = weight, in_row = min(limit, weight + gain), in_row + shared
            everything = shared == smaller
            early = taken <= FEW * larger and different >= (1.0 - RECURRING) * taken
            if evidence.passes is None:
                at_once = in_row > shared or (everything and shared > 1)
            else:
                at_once = everything and shared >= SEVERAL and chance <= RECURRING
                at_once |= early and in_row >= (SEVERAL - 1 if everything else 2 * SEVERAL)
            if at_once or weight >= limit - 1e-9:
                sure.add(pair)
                pairs[pair] = limit, in_row  # named as long as it shares half
        if rows is not None:
            self._shared += sum(count for pair, count in counts.items() if pair not in sure)
            self._looked += sum(rows) / ranks * (ranks * (ranks - 1) / 2 - len(sure))
        self._pairs = pairs
        return by_ids(record, evidence, sure)

    def state_dict(self) -> dict[str, Any]:
        pairs = [[*pair, *shared] for pair, shared in sorted(self._pairs.items())]
        return {"pairs": pairs, "shared": self._shared, "looked": self._looked}

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, list):  # of a version that kept the pairs alone
            state = {"pairs": [[*pair, 0.0, 1] for pair in state], "shared": 0.0, "looked": 0.0}
        self._pairs = {(int(i), int(j)): (float(weight), int(rows)) for i, j, weight, rows in state["pairs"]}
        self._shared, self._looked = float(state["shared"]), float(state["looked"])


def _are_context(record: StepRecord, pair: Pair, rows: Sequence[int]) -> bool:
    """Tell whether these ranks train on a part of what they take: fewer labels than rows, and other losses.

    So it is where each rank's forward takes a whole graph, and its loss some of the nodes. Ranks that train all of the
    same rows have the same loss, but for what a forward draws.
    """
    labels, losses = record.objective.labels, record.loss.per_rank
    if losses is None or not record.objective.known or labels is None or labels >= sum(rows):
        return False
    one, other = (losses[rank] for rank in pair)
    return abs(one - other) > SAME_LOSS * max(abs(one), abs(other))


def _different_rows(evidence: Evidence) -> tuple[float, int]:
    """Return how many rows the data have, or at least have, and how many a rank has taken; 0 where nobody knows."""
    passes = evidence.passes
    taken = 0 if passes is None else max(passes.taken, default=0)
    different = 0.0 if passes is None else max(passes.distinct, default=0.0)
    if evidence.coverage is not None and evidence.coverage.told:  # else several may have the same content
        different = max(different, float(evidence.coverage.rows))
    return different, taken


class FollowedRows(Detector):
    """Report a rank that takes, one by one, the rows that another rank took some rows before, whose own are new.

    So it is where both draw from one stream, which code on one rank alone has moved on. Rows that change hands from
    pass to pass are new for none.
    """

    def __init__(self) -> None:
        self._named: dict[int, int] = {}  # rank -> since which step; found anew after a resume

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        if evidence.passes is None:
            return []
        trails, named_before = evidence.passes.trails, self._named
        sure = (rank for rank, trail in trails.items() if rank in named_before or trail.times >= LONG_TRAIL)
        self._named = {rank: named_before.get(rank, record.step) for rank in sure}
        found = []
        for rank, since in self._named.items():
            leader, lag, _ = trails[rank]
            message = (
                f"Rank {rank} trains on the rows that rank {leader} took {lag} rows before, one by one, while those of "
                f"rank {leader} were new: both take them from one stream, at different places."
            )
            remedy = (
                "Give each rank's stream a seed of its own (seed + rank), or let a sampler deal the rows. Code that "
                "draws random numbers on one rank alone, as an evaluation, has moved them apart."
            )
            key, ranks = f"followed:{rank}", tuple(sorted((rank, leader)))
            found.append(Finding(key, "duplicate-data", "error", ranks, "rows", None, None, message, remedy, since))
        return found


class SampledRowsTest(Detector):
    """Follow the pairs that have shared a row lately."""

    key = "sampled_rows"
    stored = ("ranks", "steps", "pairs", "evidence", "counts", "since")

    def __init__(self, log_threshold: float):
        self._threshold = log_threshold
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._ranks, self._steps = ranks, 0  # measured steps
        self._pairs = np.empty(0, np.int64)  # sorted: first rank * N + second
        self._evidence: Array = np.empty(0)
        self._counts = np.empty((0, 3), np.int64)  # shared rows, rows of the smaller one; when the last was shared
        self._since: dict[int, int] = {}  # of the pairs that are named

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return the findings of one step; without ids, or where all rows are known, nothing changes."""
        ranks = record.world_size
        if ranks < 2 or extras.rows_sampled >= 1.0 or extras.duplicates is None or extras.rows_per_rank is None:
            return []
        rows = np.array(extras.rows_per_rank)
        if ranks != self._ranks:
            self._start(ranks)
        found = np.array([a * ranks + b for a, b in extras.duplicates], dtype=np.int64)
        shared = np.array(list(extras.duplicates.values()), dtype=np.int64)
        pairs = np.union1d(self._pairs, found)
        evidence, counts = np.zeros(len(pairs)), np.zeros((len(pairs), 3), np.int64)
        old, new = np.searchsorted(pairs, self._pairs), np.searchsorted(pairs, found)
        evidence[old], counts[old] = self._evidence, self._counts
        now = np.zeros(len(pairs), np.int64)
        now[new] = shared
        smaller = np.minimum(rows[pairs // ranks], rows[pairs % ranks])
        limit = self._threshold + math.log(ranks * (ranks - 1) / 2)
        chance = chance_of_a_row(extras, ranks)
        evidence += now * math.log(1.0 / (2.0 * chance)) - np.maximum(smaller - now, 0) * math.log(2.0)
        counts[:, :2] += np.stack([now, smaller], 1)
        self._steps += 1
        counts[now > 0, 2] = self._steps
        kept = (evidence > 0.0) & (self._steps - counts[:, 2] <= FORGET)
        self._pairs, self._counts = pairs[kept], counts[kept]
        self._evidence = np.minimum(evidence[kept], limit)
        named = self._pairs[self._evidence >= limit - 1e-9]  # the cap itself is an alarm
        standing = set(self._pairs[self._evidence >= limit / 2].tolist())
        since = {code: step for code, step in self._since.items() if code in standing}
        self._since = since | {code: since.get(code, record.step) for code in named.tolist()}
        return self._findings(record, extras)

    def _findings(self, record: StepRecord, extras: Evidence) -> list[Finding]:
        if not self._since:
            return []
        codes = np.array(sorted(self._since), np.int64)
        counts = self._counts[np.searchsorted(self._pairs, codes)]
        pairs = list(zip((codes // self._ranks).tolist(), (codes % self._ranks).tolist(), strict=True))
        shared = [(shared / max(1, smaller), shared) for shared, smaller, _ in counts.tolist()]
        told = dict(zip(pairs, shared, strict=True))
        one_in = round(1.0 / extras.rows_sampled)

        def said(inside: list[Pair]) -> tuple[float, str]:
            share, rows = max(told[pair] for pair in inside)
            return share, (
                f"about {share:.0%} of the rows that a rank takes are another's too ({rows} shared rows were seen, of "
                f"a sample of one row in {one_in})"
            )

        return shared_findings(record, pairs, said)


def chance_of_a_row(extras: Evidence, ranks: int) -> float:
    """p: that a row of one rank is another's too in health, at most; see the module docstring."""
    chance = 1.0 / ranks
    if extras.coverage is not None and extras.rows_per_rank:
        batch = sum(extras.rows_per_rank) / extras.rows_sampled / ranks
        chance = max(chance, batch / extras.coverage.rows)
    return min(chance, 0.25)


def shared_pairs(extras: Evidence) -> set[Pair]:
    """Return the pairs whose shared rows are at least half of the smaller batch, from ids.

    A sampler that pads the epoch's last batch repeats at most one row per rank.
    """
    if not extras.duplicates or extras.rows_per_rank is None:
        return set()
    rows = extras.rows_per_rank
    found = ((shared, pair) for pair, shared in extras.duplicates.items() if shared > 0)
    return {pair for shared, pair in found if 2 * shared >= min(rows[rank] for rank in pair)}


def by_ids(record: StepRecord, extras: Evidence, pairs: Collection[Pair]) -> list[Finding]:
    """Tell of ``pairs`` of ranks with the same rows."""
    counts = extras.duplicates or {}

    def said(inside: list[Pair]) -> tuple[float, str]:
        least, shared = (extreme(counts[pair] for pair in inside) for extreme in (min, max))
        smallest = min(min((extras.rows_per_rank or ())[r] for r in pair) for pair in inside)
        many = f"all {smallest}" if shared >= smallest else f"{shared} of the {smallest}"
        up_to = "up to " * (least < shared)
        return shared / smallest, f"{up_to}{many} rows that a rank takes in this step are another's too"

    return shared_findings(record, pairs, said)
