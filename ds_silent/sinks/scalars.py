"""Tag and value of every number of a record: what TensorBoard and DeepSpeed's monitor draw as curves.

curves = Curves()
curves.write_event(event)          # the ranks that it names have curves of their own from now on
curves.of(record)                  # [("silent/loss/mean", 2.31), ...]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ds_silent.distributed.parts import SHOWN_RANKS
from ds_silent.records import Event, StepRecord
from ds_silent.sinks.files import quantiles_of

MAX_RANKS_DRAWN = 16
"""Ranks up to which each has curves of its own: nobody can read more, and every viewer crawls."""
BANDS = ("min", "q10", "median", "q90", "max")
"""Quantiles that are drawn of more ranks."""


class Curves:
    """Which ranks have curves of their own where not all have: those that an event has named, the first 16 of them."""

    def __init__(self) -> None:
        self._named: dict[int, None] = {}  # in the order in which they were named

    def write_event(self, event: Event) -> None:
        """Remember whom it names; an event about many ranks names nobody."""
        if len(event.ranks) <= SHOWN_RANKS:
            for rank in event.ranks:
                if len(self._named) < MAX_RANKS_DRAWN:
                    self._named[rank] = None

    def of(self, record: StepRecord) -> list[tuple[str, float]]:
        """The :func:`scalars` of a record."""
        return scalars(record, self._named)


def scalars(record: StepRecord, named: Iterable[int] = ()) -> list[tuple[str, float]]:
    """``(tag, value)`` of everything measured in ``record``; what is ``None`` is left out, NaN and inf are not.

    Args:
        named: ranks that have curves of their own where the ranks are too many for all to have them.
    """
    loss, norm, direction = record.loss, record.grad_norm, record.direction
    coverage, integrity = record.coverage, record.integrity
    groups = integrity.replica_groups
    values: list[tuple[str, float | None]] = [
        ("silent/loss/mean", loss.mean),
        ("silent/loss/std", loss.std),
        ("silent/loss/range", loss.range),
        ("silent/grad_norm/mean", norm.mean),
        ("silent/grad_norm/std", norm.std),
        ("silent/grad_norm/cv", norm.cv),
        ("silent/grad_norm/aggregated", norm.aggregated),
        ("silent/direction/mean_cosine", direction.mean_cosine),
        ("silent/direction/min_cosine", direction.min_cosine),
        ("silent/direction/max_cosine", direction.max_cosine),
        ("silent/direction/exact_check", record.exact_check),
        ("silent/noise_scale", record.noise_scale),
        ("silent/coverage/duplicates", coverage.duplicates),
        ("silent/coverage/seen", coverage.seen),
        ("silent/coverage/repeated", coverage.repeated),
        ("silent/integrity/relative_error", integrity.relative_error),
        ("silent/integrity/rounding_bound", integrity.rounding_bound),
        ("silent/integrity/replica_groups", None if groups is None else len(groups)),
    ]
    everybody = record.world_size <= MAX_RANKS_DRAWN
    for metric, each in (("loss", loss.per_rank), ("grad_norm", norm.per_rank), ("cosine", direction.per_rank)):
        values += _per_rank(metric, each or (), range(record.world_size) if everybody else named)
        if not everybody:
            values += _bands(metric, each or ())
    for layer in record.layers:
        values.append((f"silent/per_layer/mean_cosine/{layer.name}", layer.mean_cosine))
        values.append((f"silent/per_layer/mean_norm/{layer.name}", layer.mean_norm))
        values.append((f"silent/per_layer/norm_cv/{layer.name}", layer.norm_cv))
    return [(tag, float(value)) for tag, value in values if value is not None]


def _per_rank(metric: str, values: Sequence[float], ranks: Iterable[int]) -> Iterator[tuple[str, float | None]]:
    for rank in ranks:
        if rank < len(values):
            yield f"silent/per_rank/{metric}/rank_{rank}", values[rank]


def _bands(metric: str, values: Sequence[float]) -> Iterator[tuple[str, float | None]]:
    quantiles = quantiles_of(values)
    for name in BANDS if quantiles is not None else ():
        yield f"silent/per_rank/{metric}/{name}", getattr(quantiles, name)
