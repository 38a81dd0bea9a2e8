"""N workers that do the work of fewer: ranks that hold the same rows.

From row ids, where the training gives them: :mod:`ds_silent.detectors.same_rows`. From the gradients alone otherwise:
equal rows on equal weights give the same bits, so the sketches are equal, the cosine is 1 and the losses and norms are
the same. This is no matter of chance, and no false-alarm rate applies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import SAME_WORK, StepRecord
from ds_silent.text import named

COSINE_GAP = 2.0**-16
"""1 - cosine that bf16 gradients of the same rows can have when a device adds in another order (u^2, u = 2^-8)."""
SAME_LOSS, SAME_NORM = 1e-6, 2.0**-8  # relative
SLACK = 3.0  # of a squared distance that is known by a few numbers
WINDOW = 512  # ranks of one loss that are compared with each other, nearest first
MAX_GROUPS = 8  # reported one by one
FEW = 8  # ranks of a group whose rows are looked at
_IN_ROW, _NEARLY = 32, 3  # measured steps
Ranks = npt.NDArray[np.int64]
Pair = tuple[int, int]

_WASTE = "Their work is done more than once."
_SHARDING = (
    "a DistributedSampler (or set_epoch and rank-dependent seeds), what a trainer prepares loaders with "
    "(accelerator.prepare), split_dataset_by_node for iterable data; check that the rank is read after the process "
    "group exists."
)
_REMEDY = f"Shard the data: {_SHARDING}"
_SEEDS = (
    "Give each rank a seed of its own for what it draws in training, such as a generator's noise: seed + rank, once "
    f"the model is made. If the rows are the same, shard the data: {_SHARDING}"
)


class SameGradients(Detector):
    """Compare the gradients of ranks that no row ids have named; ids may be counted per rank.

    Ranks that took the same rows have the same gradient. Where the ids show that, and do not name the ranks, they took
    them by chance, as few rows of a batch or contents that recur: ``_IN_ROW`` steps in a row are none. Gradients that
    are equal but for rounding may come of other rows, as of a classifier whose batches have one class alone: they must
    be so for ``_NEARLY`` steps in a row, or ``_IN_ROW`` where the rows' contents are known to be others.
    """

    def __init__(self, alike: bool = True):
        self._alike = alike
        self._steps: dict[tuple[int, ...], int] = {}  # in a row, of ranks with the same gradient; a resume forgets it

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        named_before = any(finding.kind == "duplicate-data" for finding in before)
        found = by_gradients(record, evidence.directions) if self._alike and not named_before else []
        self._steps = {one.ranks: self._steps.get(one.ranks, 0) + 1 for one in found}
        sure = [one for one in found if self._steps[one.ranks] >= _steps_needed(record, evidence, one.ranks)]
        return [_of_the_rows(one, record, evidence) for one in sure]


def _steps_needed(record: StepRecord, evidence: Evidence, ranks: Sequence[int]) -> int:
    """Return at how many steps in a row ranks must have the same gradient."""
    shared = evidence.duplicates or {}
    if any(pair in shared for pair in combinations(ranks[:FEW], 2)):
        return _IN_ROW
    losses, norms = record.loss.per_rank or (), record.grad_norm.per_rank or ()
    if len({(losses[rank], norms[rank]) for rank in ranks}) == 1:
        return 1
    by_content = evidence.duplicates is not None and evidence.passes is not None and evidence.rows_sampled == 1.0
    return _IN_ROW if by_content else _NEARLY


def _of_the_rows(found: Finding, record: StepRecord, evidence: Evidence) -> Finding:
    """Say no more than is known where the ranks took other rows, or none: they may have drawn the same noise."""
    rows = [] if evidence.rows_per_rank is None else [evidence.rows_per_rank[rank] for rank in found.ranks]
    none = evidence.no_rows or (bool(rows) and not any(rows) and evidence.rows_sampled == 1.0)
    shared = evidence.duplicates or {}
    others = bool(rows) and all(rows) and not any(pair in shared for pair in combinations(found.ranks[:FEW], 2))
    if not (none or others):
        return found
    known = "This step took no rows of a loader" if none else "By their ids or contents the rows are not the same"
    message = (
        f"{named(found.ranks, record.world_size).capitalize()} have the same gradient and the same loss: they "
        f"{SAME_WORK}, from the same rows or the same random numbers. {known}. {_WASTE}"
    )
    return replace(found, message=message, remedy=_SEEDS)


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
    if directions is not None:
        return [_same(record, group) for group in same_directions(directions, losses, norms)]
    ranks, direction, matrix = range(record.world_size), record.direction, record.cosine_matrix
    if matrix is None:
        near = [(0, j) for j in ranks if j] if (direction.mean_cosine or 0.0) >= 1.0 - COSINE_GAP else []
    elif direction.max_cosine is not None and direction.max_cosine < 1.0 - COSINE_GAP:
        return []  # the common case, without looking at N^2 pairs
    else:
        near = [(i, j) for i, j in combinations(ranks, 2) if matrix[i][j] >= 1.0 - COSINE_GAP]
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
