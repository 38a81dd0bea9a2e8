"""N workers that do the work of fewer: ranks that hold the same rows.

From row ids, where the training gives them: exact. From the gradients alone otherwise: equal rows on equal weights
give the same bits, so the sketches are equal, the cosine is 1 and the losses and norms are the same. None of this is
a matter of chance, and no false-alarm rate applies: see the two functions for what health can look like.

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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.order import TOLERATED_BY_CONTENT
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Event, StepRecord
from ds_silent.text import named

COSINE_GAP = 2.0**-16
"""1 - cosine that bf16 gradients of the same rows can have when a device adds in another order (u^2, u = 2^-8)."""
SAME_LOSS, SAME_NORM = 1e-6, 2.0**-8  # relative
SLACK = 3.0  # of a squared distance that is known by a few numbers
WINDOW = 512  # ranks of one loss that are compared with each other, nearest first
MAX_GROUPS = 8  # reported one by one
OVERLAP, SELDOM = 32, 4.0  # rows that each other rank had taken; times as rare on the own rank
FORGET = 32  # measured steps without a shared row, after which a pair begins anew
Ranks = npt.NDArray[np.int64]
Pair = tuple[int, int]

_WASTE = "Their work is done more than once."
_REMEDY = (
    "Shard the data: a DistributedSampler (or set_epoch and rank-dependent seeds), split_dataset_by_node for "
    "iterable data; check that the rank is read after the process group exists."
)


class SameRows(Detector):
    """Compare the rows of the ranks, where all of them are known."""

    key = "pairs_before"

    def __init__(self) -> None:
        self._pairs: set[Pair] = set()  # of the previous measured step

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        if evidence.rows_sampled < 1.0:  # see ``SampledRowsTest``
            return []
        found = by_ids(record, evidence, self._pairs)
        self._pairs = shared_pairs(evidence)
        return found

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in sorted(self._pairs)]

    def load_state_dict(self, state: Any) -> None:
        self._pairs = {(int(i), int(j)) for i, j in state}


class SameGradients(Detector):
    """Compare the gradients of ranks that no row ids have named; ids may be counted per rank."""

    def __init__(self, alike: bool = True):
        self._alike = alike

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        named_before = any(finding.kind == "duplicate-data" for finding in before)
        return by_gradients(record, evidence.directions) if self._alike and not named_before else []


class OverlapTest(Detector):
    """Note ranks that read the same data, each in an order of its own, where nobody knows how long a pass is.

    No two ranks need share a row at one step. Rows that come again in the first pass come from another rank then, and
    seldom from their own. Rows dealt anew at random, drawn with replacement, or held several times by the data come
    again on their own rank as often as on each other one.
    """

    key = "overlap"
    stored = ("before", "own", "others", "over")

    def __init__(self) -> None:
        self._before = self._own = self._others = 0.0  # rows that had come before: up to the last step, and by whom
        self._over = False

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes, passes, share = (), evidence.passes, record.coverage.repeated
        if self._over or passes is None or share is None or evidence.coverage is not None or evidence.dealt == "random":
            return []
        again, others = share * sum(passes.taken), len(passes.taken) - 1
        new, self._before = again - self._before, again
        own = new * (passes.again or 0.0)
        self._own, self._others = self._own + own, self._others + new - own
        if new < -0.5 or not others or any(finding.kind == "duplicate-data" for finding in before):
            self._over = True  # a pass has ended, or more is known
        elif (
            self._others >= OVERLAP * others
            and share >= TOLERATED_BY_CONTENT
            and self._own <= self._others / others / SELDOM
        ):
            self._over, ranks = True, tuple(range(record.world_size))
            message = (
                f"Ranks read the same data: {share:.0%} of the rows so far had been taken before, {self._others:.0f} "
                f"by another rank and {self._own:.0f} by the same."
            )
            remedy = (
                "Do nothing if each rank is meant to read all data in an order of its own. Else give each rank files "
                "or rows of its own (files[rank::world_size], split_dataset_by_node)."
            )
            self.notes = (Event(record.step, "duplicate-data", "info", ranks, "loader", share, None, message, remedy),)
        return []


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
        told = {
            pair: (shared / max(1, smaller), shared)
            for pair, (shared, smaller, _) in zip(pairs, counts.tolist(), strict=True)
        }
        one_in = round(1.0 / extras.rows_sampled)

        def said(inside: list[Pair]) -> tuple[float, str]:
            share, rows = max(told[pair] for pair in inside)
            text = (
                f"about {share:.0%} of the rows of a rank are the same rows ({rows} shared rows were seen, of a sample "
                f"of one row in {one_in})"
            )
            return share, text

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

    Health has two kinds of shared rows: a sampler that pads the epoch's last batch repeats at most one row per rank,
    and sampling with replacement shares about b/n of the b rows. One shared row is therefore counted only when
    the caller sees it twice in a row (see :func:`by_ids`); half of a batch is reached by chance only with b near n/2.
    """
    if not extras.duplicates or extras.rows_per_rank is None:
        return set()
    rows = extras.rows_per_rank
    return {
        pair for pair, shared in extras.duplicates.items() if shared > 0 and 2 * shared >= min(rows[r] for r in pair)
    }


def by_ids(record: StepRecord, extras: Evidence, before: set[Pair]) -> list[Finding]:
    """Find ranks with the same rows; ``before`` are the pairs of the previous measured step."""
    pairs = shared_pairs(extras)
    counts = extras.duplicates or {}
    sure = {pair for pair in pairs if counts[pair] > 1 or pair in before}

    def said(inside: list[Pair]) -> tuple[float, str]:
        shared = max(counts[pair] for pair in inside)
        smallest = min(min((extras.rows_per_rank or ())[r] for r in pair) for pair in inside)
        text = f"up to {shared} of the {smallest} rows of a rank are the same rows in this step"
        return shared / smallest, text

    return shared_findings(record, sure, said)


def shared_findings(
    record: StepRecord, pairs: Collection[Pair], said: Callable[[list[Pair]], tuple[float, str]]
) -> list[Finding]:
    """Return one finding per group of ranks with the same rows; of more than ``MAX_GROUPS`` groups one for all."""
    found = groups(pairs)
    place = {rank: number for number, group in enumerate(found) for rank in group}
    inside: list[list[Pair]] = [[] for _ in found]
    for pair in pairs:
        inside[place[pair[0]]].append(pair)
    told = list(map(said, inside))
    if len(found) <= MAX_GROUPS:
        findings = []
        for group, (share, text) in zip(found, told, strict=True):
            message = f"{named(group, record.world_size).capitalize()} train on the same data: {text}. {_WASTE}"
            findings.append(_finding(record, group, "rows", share, 0.5, message))
        return findings
    share, text = max(told)
    shown = "; ".join(named(group) for group in found[:3])
    message = (
        f"{len(found)} groups of ranks train on the same data within each ({shown}; and {len(found) - 3} more groups): "
        f"{text}. {_WASTE}"
    )
    return [_finding(record, tuple(sorted(place)), "rows", share, 0.5, message)]


def by_gradients(record: StepRecord, directions: Array | None = None) -> list[Finding]:
    """Find ranks with the same gradient and the same loss, without ids.

    Args:
        directions: (N, P) float64, of a record without cosines of pairs: see :func:`same_directions`.

    Different rows would need a batch 2^16 times the gradient noise scale to come as near (cosine = 1/(1 + B_noise/b)),
    and their losses would still differ. A model whose gradients have one direction only (one parameter) is
    held back by the losses.
    """
    losses, norms = record.loss.per_rank, record.grad_norm.per_rank
    if losses is None or norms is None:
        return []
    ranks = range(record.world_size)
    if directions is not None:
        return [_same(record, group) for group in same_directions(directions, losses, norms)]
    if record.cosine_matrix is not None:
        highest = record.direction.max_cosine
        if highest is not None and highest < 1.0 - COSINE_GAP:  # the common case, without looking at N^2 pairs
            return []
        matrix = record.cosine_matrix
        near = [(i, j) for i in ranks for j in ranks if i < j and matrix[i][j] >= 1.0 - COSINE_GAP]
    elif (record.direction.mean_cosine or 0.0) >= 1.0 - COSINE_GAP:
        near = [(0, j) for j in ranks if j]
    else:
        return []
    same = [p for p in near if _close(losses, p, SAME_LOSS) and _close(norms, p, SAME_NORM)]
    return [_same(record, group) for group in groups(same)]


def same_directions(directions: Array, losses: Sequence[float], norms: Sequence[float]) -> list[tuple[int, ...]]:
    """Return groups of ranks with the same gradient and loss, from a few numbers of each: for any number of ranks.

    The numbers are the unit gradient's sketch, folded once more, so that the squared distance of two ranks is that of
    their gradients, 2 (1 - cosine), times a chi-squared of P degrees of freedom over P. Of ranks that are COSINE_GAP
    apart it is below SLACK times the expected with probability 0.9999; for P = 16 two ranks of cosine 0.999 would come
    as near once in 10^8, and their losses and norms would have to be the same as well.

    Args:
        directions: (N, P) float64; NaN where a rank has none.
        losses, norms: (N,).
    """
    loss, norm = np.asarray(losses), np.asarray(norms)
    limit = SLACK * 2.0 * COSINE_GAP
    by_loss = np.argsort(loss, kind="stable")
    steps = np.diff(loss[by_loss]) > SAME_LOSS * np.abs(loss[by_loss][1:])  # chains of equal losses
    chain = np.empty(len(loss), dtype=np.int64)
    chain[by_loss] = np.concatenate(([0], np.cumsum(steps)))
    order = np.lexsort((directions[:, 0], chain))
    first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for apart in range(1, min(len(order), WINDOW)):
        one, other = order[:-apart], order[apart:]
        near = (chain[one] == chain[other]) & ((directions[one, 0] - directions[other, 0]) ** 2 <= limit)
        if not near.any():
            break
        one, other = one[near], other[near]
        same = np.square(directions[one] - directions[other]).sum(1) <= limit
        same &= np.abs(norm[one] - norm[other]) <= SAME_NORM * np.maximum(norm[one], norm[other])
        first.append(one[same])
        second.append(other[same])
    return _connected(len(loss), np.concatenate(first), np.concatenate(second))


def _connected(count: int, first: Ranks, second: Ranks) -> list[tuple[int, ...]]:
    """Return the groups of two or more of ``count`` that the pairs connect, in order of their first."""
    label = np.arange(count)
    while True:
        before, low = label.copy(), np.minimum(label[first], label[second])
        for ends in (label[first], label[second]):
            np.minimum.at(label, ends, low)
        label = label[label]
        if (label == before).all():
            break
    members: dict[int, list[int]] = {}
    for one in np.flatnonzero(np.bincount(label, minlength=count)[label] > 1).tolist():
        members.setdefault(int(label[one]), []).append(one)
    return [tuple(group) for _, group in sorted(members.items())]


def _same(record: StepRecord, group: tuple[int, ...]) -> Finding:
    message = (
        f"{named(group, record.world_size).capitalize()} have the same gradient and the same loss: they train on the "
        "same data, and their work is done twice."
    )
    return _finding(record, group, "gradient", 1.0, 1.0 - COSINE_GAP, message)


def groups(pairs: Collection[Pair]) -> list[tuple[int, ...]]:
    """Return the connected components, each sorted, in order of their first rank."""
    if not pairs:  # nearly always
        return []
    ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return _connected(int(ends.max(initial=-1)) + 1, ends[:, 0], ends[:, 1])


def _finding(record: StepRecord, group: tuple[int, ...], where: str, score: float, limit: float, text: str) -> Finding:
    key = f"duplicate-data:{','.join(map(str, group))}"
    return Finding(key, "duplicate-data", "error", group, where, score, limit, text, _REMEDY, record.step)


def _close(values: tuple[float, ...], pair: Pair, tolerance: float) -> bool:
    a, b = values[pair[0]], values[pair[1]]
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
