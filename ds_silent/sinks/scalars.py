"""Tag and value of every number of a record: what TensorBoard and DeepSpeed's monitor draw as curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_silent.records import StepRecord

MAX_RANKS_DRAWN = 64
"""Above this many ranks the per-rank curves are not written: nobody can read them and every viewer crawls."""


def scalars(record: StepRecord) -> list[tuple[str, float]]:
    """``(tag, value)`` of everything measured in ``record``; what is ``None`` is left out, NaN and inf are not."""
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
    if record.world_size <= MAX_RANKS_DRAWN:
        values += _per_rank("loss", loss.per_rank)
        values += _per_rank("grad_norm", norm.per_rank)
        values += _per_rank("cosine", direction.per_rank)
    for layer in record.layers:
        values.append((f"silent/per_layer/mean_cosine/{layer.name}", layer.mean_cosine))
        values.append((f"silent/per_layer/mean_norm/{layer.name}", layer.mean_norm))
        values.append((f"silent/per_layer/norm_cv/{layer.name}", layer.norm_cv))
    return [(tag, float(value)) for tag, value in values if value is not None]


def _per_rank(metric: str, values: Sequence[float | None] | None) -> Iterator[tuple[str, float | None]]:
    for rank, value in enumerate(values or ()):
        yield f"silent/per_rank/{metric}/rank_{rank}", value
