"""N workers that do the work of fewer: ranks that hold the same rows.

From row ids, where the training gives them: exact. From the gradients alone otherwise: equal rows on equal weights
give the same bits, so the sketches are equal, the cosine is 1 and the losses and norms are the same. None of this is
a matter of chance, and no false-alarm rate applies: see the two functions for what health can look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ds_silent.detectors.finding import Evidence, Finding, named
from ds_silent.records import StepRecord

COSINE_GAP = 2.0**-16
"""1 - cosine that bf16 gradients of the same rows can have when a device adds in another order (u^2, u = 2^-8)."""
SAME_LOSS, SAME_NORM = 1e-6, 2.0**-8  # relative

MAX_GROUPS = 8  # told one by one
_WASTE = "Their work is done more than once."
_REMEDY = (
    "Shard the data: a DistributedSampler (or set_epoch and rank-dependent seeds), split_dataset_by_node for "
    "iterable data; check that the rank is read after the process group exists."
)


def shared_pairs(extras: Evidence) -> set[tuple[int, int]]:
    """Pairs whose shared rows are at least half of the smaller batch, from ids.

    Health has two kinds of shared rows: a sampler that pads the epoch's last batch repeats at most one row per rank,
    and sampling with replacement shares about b/n of the b rows. One shared row is therefore counted only when
    the caller sees it twice in a row (see ``Judge``); half of a batch is reached by chance only with b near n/2.
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


def by_gradients(record: StepRecord) -> list[Finding]:
    """Ranks with the same gradient and the same loss, without ids.

    Different rows would need a batch 2^16 times the gradient noise scale to come as near (cosine = 1/(1 + B_noise/b)),
    and their losses would still differ. A model whose gradients have one direction only (one parameter) is
    held back by the losses.
    """
    losses, norms = record.loss.per_rank, record.grad_norm.per_rank
    if losses is None or norms is None:
        return []
    ranks = range(record.world_size)
    if record.cosine_matrix is not None:
        highest = record.direction.max_cosine
        if highest is not None and highest < 1.0 - COSINE_GAP:  # the common case, without looking at N^2 pairs
            return []
        matrix = record.cosine_matrix
        near = [(i, j) for i in ranks for j in ranks if i < j and matrix[i][j] >= 1.0 - COSINE_GAP]
    elif (record.direction.mean_cosine or 0.0) >= 1.0 - COSINE_GAP:  # above the gather limit pairs are not known
        near = [(0, j) for j in ranks if j]
    else:
        return []
    same = [p for p in near if _close(losses, p, SAME_LOSS) and _close(norms, p, SAME_NORM)]
    message = "{} have the same gradient and the same loss: they train on the same data, and their work is done twice."
    return [
        _finding(record, group, "gradient", 1.0, 1.0 - COSINE_GAP, message.format(_start(group, record.world_size)))
        for group in groups(same)
    ]


def groups(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Connected components, each sorted, in order of their first rank."""
    member: dict[int, set[int]] = {}
    for i, j in pairs:
        joined = member.get(i, {i}) | member.get(j, {j})
        for rank in joined:
            member[rank] = joined
    return sorted({tuple(sorted(group)) for group in member.values()})


def _finding(record: StepRecord, group: tuple[int, ...], where: str, score: float, limit: float, text: str) -> Finding:
    key = f"duplicate-data:{','.join(map(str, group))}"
    return Finding(
        key=key,
        kind="duplicate-data",
        severity="error",
        ranks=group,
        where=where,
        score=score,
        threshold=limit,
        message=text,
        remedy=_REMEDY,
        since=record.step,
    )


def _start(group: tuple[int, ...], world_size: int) -> str:
    return named(group, world_size).capitalize()


def _close(values: tuple[float, ...], pair: tuple[int, int], tolerance: float) -> bool:
    a, b = values[pair[0]], values[pair[1]]
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
