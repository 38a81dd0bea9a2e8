"""Ranks that hold the same rows, where only a sample of the rows is known (:mod:`ds_silent.exchange.row_ids`).

Of a rank's few sampled rows at one step, one that another rank has too may be chance; the same pair again and again is
none. Null hypothesis, for a pair of ranks: a row that one of them holds is among the other's with probability at most
p, one by one. Shards share no row, but for the at most one per rank that fills an epoch up; ranks that draw
independently of each other, from n rows b each, have p = b / n. An epoch is at least a step long, so p <= 1 / N; where
it is known to be shorter, p = b / n. The alternative: they share half of their rows, or all. Each row that both hold is
evidence of log(1 / 2p), each that only one holds of -log 2: the expectation of the ratio is at most 1. Evidence adds up
over the steps and never falls below 0 (a pair that has shared nothing for ``FORGET`` steps begins anew), and a pair is
named at log(mean steps between false alarms) + log(N (N - 1) / 2), for all pairs are looked at.

Health, then: the rows that fill an epoch up are at most one per rank and epoch: one of the 4 that it takes, at 1,024 to
65,536 ranks and the default rate. The power: a pair with the same rows has sent Binomial(s b, r) of them, at a rate r,
after s steps of b rows, and is named when these are K = ceil(threshold / log(1 / 2p)):

    P(named within s steps) = P(Binomial(s b, r) >= K)

16,384 ranks of 8 rows send one row in 16: K = 4 and 8 steps in the mean, 96 % within 16 steps and 99.9 % within 28.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.duplicate_data import groups, shared_findings
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import StepRecord

FORGET = 32


class SampledRowsTest(Detector):
    """Follow the pairs that have shared a row lately.

    Args:
        log_threshold: log of the mean number of measured steps between false alarms.
    """

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
        if extras.rows_sampled >= 1.0 or extras.duplicates is None or extras.rows_per_rank is None:
            return []
        ranks, rows = record.world_size, np.array(extras.rows_per_rank)
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
        told = {}
        for pair, (shared, smaller, _) in zip(pairs, counts.tolist(), strict=True):
            told[pair] = (shared / max(1, smaller), shared)
        one_in = round(1.0 / extras.rows_sampled)

        def said(group: tuple[int, ...], inside: list[tuple[int, int]]) -> tuple[float, str]:
            share, rows = max(told[pair] for pair in inside)
            text = (
                f"about {share:.0%} of the rows of a rank are the same rows ({rows} shared rows were seen, of a sample "
                f"of one row in {one_in})"
            )
            return share, text

        return shared_findings(record, groups(pairs), pairs, said)


def chance_of_a_row(extras: Evidence, ranks: int) -> float:
    """p: that a row of one rank is another's too in health, at most; see the module docstring."""
    chance = 1.0 / ranks
    if extras.coverage is not None and extras.rows_per_rank:
        batch = sum(extras.rows_per_rank) / extras.rows_sampled / ranks
        chance = max(chance, batch / extras.coverage.rows)
    return min(chance, 0.25)
