"""What is written of a record or an event that is about many ranks: as much of it as of one about few. Pure.

    written_record(record)      # above 64 ranks: quantiles and the extreme ranks in the place of every rank's value;
                                # above 32 with eight digits of each
    written_event(event)        # at most 64 ranks, and how many there are

In memory both keep every rank: the detectors, the callbacks and the file of raw values (``per_rank``) read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ds_silent.records import DirectionStats, Event, Extremes, GradNormStats, LossStats, Quantiles, StepRecord

MOST_RANKS = 64
"""Ranks up to which all are written one by one."""
MANY = 32
"""Ranks above which their values are written with DIGITS digits: so a line of 64 ranks has less than 4 kB."""
DIGITS = 8  # fp32, in which the ranks' values travelled, has seven
EXTREME = 8
"""Ranks with the lowest values, and as many with the highest."""
SHOWN_GROUPS = 8
_PLACES = {"min": 0.0, "q10": 0.1, "q25": 0.25, "median": 0.5, "q75": 0.75, "q90": 0.9, "max": 1.0}

Stats = TypeVar("Stats", LossStats, GradNormStats, DirectionStats)


def written_record(record: StepRecord) -> StepRecord:
    """As ``metrics.jsonl`` holds it: of a size that does not grow with the ranks."""
    if record.world_size <= MANY:
        return record
    if record.world_size <= MOST_RANKS:
        return replace(
            record,
            loss=_rounded(record.loss),
            grad_norm=_rounded(record.grad_norm),
            direction=_rounded(record.direction),
        )
    groups = record.integrity.replica_groups
    sizes = None if groups is None else tuple(sorted(map(len, groups), reverse=True)[:SHOWN_GROUPS])
    count = None if groups is None else len(groups)
    return replace(
        record,
        loss=_summed_up(record.loss),
        grad_norm=_summed_up(record.grad_norm),
        direction=_summed_up(record.direction),
        integrity=replace(record.integrity, replica_groups=None, replica_group_count=count, replica_group_sizes=sizes),
    )


def written_event(event: Event) -> Event:
    """As ``events.jsonl`` holds it."""
    if len(event.ranks) <= MOST_RANKS:
        return event
    whole = None if event.global_ranks is None else event.global_ranks[:MOST_RANKS]
    return replace(event, ranks=event.ranks[:MOST_RANKS], global_ranks=whole, ranks_total=len(event.ranks))


def quantiles_of(values: Sequence[float]) -> Quantiles | None:
    """Of the values that are numbers, infinities among them; None where there is none."""
    return _quantiles(np.sort(np.array(values, dtype=np.float64)))


def _summed_up(stats: Stats) -> Stats:
    if stats.per_rank is None:
        return stats
    values = np.array(stats.per_rank, dtype=np.float64)
    order = np.argsort(values)  # NaN comes last: a rank without a number is among the highest
    return replace(stats, per_rank=None, quantiles=_quantiles(values[order]), extremes=_extremes(values, order))


def _rounded(stats: Stats) -> Stats:
    if stats.per_rank is None:
        return stats
    return replace(stats, per_rank=tuple(float(f"{value:.{DIGITS}g}") for value in stats.per_rank))


def _quantiles(ordered: npt.NDArray[np.float64]) -> Quantiles | None:
    known = int(np.searchsorted(ordered, np.nan))  # sorted behind every number
    if known == 0:
        return None
    at = {name: float(ordered[round(share * (known - 1))]) for name, share in _PLACES.items()}
    return Quantiles(**at, nan=len(ordered) - known or None)


def _extremes(values: npt.NDArray[np.float64], order: npt.NDArray[np.intp]) -> Extremes:
    ranks = np.concatenate((order[:EXTREME], order[-EXTREME:]))
    return dict(zip(ranks.tolist(), values[ranks].tolist(), strict=True))
