"""N workers that do the work of fewer: ranks that hold the same rows.

From row ids, where the training gives them: exact. From the gradients alone otherwise: equal rows on equal weights
give the same bits, so the sketches are equal, the cosine is 1 and the losses and norms are the same. None of this is
a matter of chance, and no false-alarm rate applies: see the two functions for what health can look like.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_silent.detectors.finding import Evidence, Finding, named
from ds_silent.records import StepRecord

COSINE_GAP = 2.0**-16
"""1 - cosine that bf16 gradients of the same rows can have when a device adds in another order (u^2, u = 2^-8)."""
SAME_LOSS, SAME_NORM = 1e-6, 2.0**-8  # relative

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
    findings = []
    for group in groups(sure):
        ranks = set(group)
        inside = [pair for pair in sure if pair[0] in ranks]
        shared = max(counts[pair] for pair in inside)
        smallest = min(min((extras.rows_per_rank or ())[r] for r in pair) for pair in inside)
        message = (
            f"{named(group, record.world_size).capitalize()} train on the same data: up to {shared} of the {smallest} "
            "rows of a rank are the same rows in this step. Their work is done more than once."
        )
        findings.append(_finding(record, group, "rows", shared / smallest, 0.5, message))
    return findings


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
    member: dict[int, list[int]] = {}
    for i, j in pairs:
        few, many = sorted((member.setdefault(i, [i]), member.setdefault(j, [j])), key=len)
        if few is not many:  # the smaller joins the larger: of N ranks in one group each moves log2(N) times at most
            many += few
            member.update(dict.fromkeys(few, many))
    return sorted(tuple(sorted(group)) for group in {id(group): group for group in member.values()}.values())


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
