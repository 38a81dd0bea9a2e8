"""N workers that do the work of fewer: ranks that hold the same rows.

From row ids, where the training gives them: exact. From the gradients alone otherwise: equal rows on equal weights
give the same bits, so the sketches are equal, the cosine is 1 and the losses and norms are the same. None of this is
a matter of chance, and no false-alarm rate applies: see the two functions for what health can look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.measure.evidence import Evidence
from ds_silent.records import StepRecord
from ds_silent.text import named

COSINE_GAP = 2.0**-16
"""1 - cosine that bf16 gradients of the same rows can have when a device adds in another order (u^2, u = 2^-8)."""
SAME_LOSS, SAME_NORM = 1e-6, 2.0**-8  # relative
SLACK = 3.0  # of a squared distance that is known by a few numbers
WINDOW = 512  # ranks of one loss that are compared with each other, nearest first
Array = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]

MAX_GROUPS = 8  # told one by one
_WASTE = "Their work is done more than once."
_REMEDY = (
    "Shard the data: a DistributedSampler (or set_epoch and rank-dependent seeds), split_dataset_by_node for "
    "iterable data; check that the rank is read after the process group exists."
)


class SameRows(Detector):
    """Compare the rows of the ranks, where all of them are known."""

    key = "pairs_before"

    def __init__(self) -> None:
        self._pairs: set[tuple[int, int]] = set()  # of the previous measured step

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        if evidence.rows_sampled < 1.0:  # see ``sampled_rows``
            return []
        found = by_ids(record, evidence, self._pairs)
        self._pairs = shared_pairs(evidence)
        return found

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in sorted(self._pairs)]

    def load_state_dict(self, state: Any) -> None:
        self._pairs = {(int(i), int(j)) for i, j in state}


class SameGradients(Detector):
    """Compare the gradients of ranks that no row ids have named; ids may be counted per rank.

    Args:
        alike: whether ranks compute comparable gradients at all.
    """

    def __init__(self, alike: bool = True):
        self._alike = alike

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        named_before = any(finding.kind == "duplicate-data" for finding in before)
        return by_gradients(record, evidence.directions) if self._alike and not named_before else []


def shared_pairs(extras: Evidence) -> set[tuple[int, int]]:
    """Pairs whose shared rows are at least half of the smaller batch, from ids.

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


def by_ids(record: StepRecord, extras: Evidence, before: set[tuple[int, int]]) -> list[Finding]:
    """Ranks with the same rows; ``before`` are the pairs of the previous measured step."""
    pairs = shared_pairs(extras)
    counts = extras.duplicates or {}
    sure = {pair for pair in pairs if counts[pair] > 1 or pair in before}

    def said(group: tuple[int, ...], inside: list[tuple[int, int]]) -> tuple[float, str]:
        shared = max(counts[pair] for pair in inside)
        smallest = min(min((extras.rows_per_rank or ())[r] for r in pair) for pair in inside)
        text = f"up to {shared} of the {smallest} rows of a rank are the same rows in this step"
        return shared / smallest, text

    return shared_findings(record, groups(sure), sure, said)


def shared_findings(
    record: StepRecord,
    found: Sequence[tuple[int, ...]],
    pairs: Iterable[tuple[int, int]],
    said: Callable[[tuple[int, ...], list[tuple[int, int]]], tuple[float, str]],
) -> list[Finding]:
    """A finding for each group of ranks with the same rows; one for all, where they are more than ``MAX_GROUPS``.

    Args:
        pairs: those that the groups hang together by.
        said: of a group and its pairs, the largest share of a rank's rows, and what is said of it.
    """
    place = {rank: number for number, group in enumerate(found) for rank in group}
    inside: list[list[tuple[int, int]]] = [[] for _ in found]
    for pair in pairs:
        inside[place[pair[0]]].append(pair)
    if len(found) <= MAX_GROUPS:
        findings = []
        for group, own in zip(found, inside, strict=True):
            share, text = said(group, own)
            message = f"{_start(group, record.world_size)} train on the same data: {text}. {_WASTE}"
            findings.append(_finding(record, group, "rows", share, 0.5, message))
        return findings
    everyone = tuple(sorted(place))
    share, text = max(said(group, own) for group, own in zip(found, inside, strict=True))
    shown = "; ".join(named(group) for group in found[:3])
    message = (
        f"{len(found)} groups of ranks train on the same data within each ({shown}; and {len(found) - 3} more groups): "
        f"{text}. {_WASTE}"
    )
    return [_finding(record, everyone, "rows", share, 0.5, message)]


def by_gradients(record: StepRecord, directions: Array | None = None) -> list[Finding]:
    """Ranks with the same gradient and the same loss, without ids.

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
    """Groups of ranks with the same gradient and loss, from a few numbers of each: any number of ranks.

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
    """Groups of two or more of ``count`` that the pairs connect, in order of their first."""
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
    message = "{} have the same gradient and the same loss: they train on the same data, and their work is done twice."
    return _finding(record, group, "gradient", 1.0, 1.0 - COSINE_GAP, message.format(_start(group, record.world_size)))


def groups(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Connected components, each sorted, in order of their first rank."""
    ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return _connected(int(ends.max(initial=-1)) + 1, ends[:, 0], ends[:, 1])


def _finding(record: StepRecord, group: tuple[int, ...], where: str, score: float, limit: float, text: str) -> Finding:
    key = f"duplicate-data:{','.join(map(str, group))}"
    return Finding(key, "duplicate-data", "error", group, where, score, limit, text, _REMEDY, record.step)


def _start(group: tuple[int, ...], world_size: int) -> str:
    return named(group, world_size).capitalize()


def _close(values: tuple[float, ...], pair: tuple[int, int], tolerance: float) -> bool:
    a, b = values[pair[0]], values[pair[1]]
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
