"""Name every number of a record once: in the records, on the screen, in TensorBoard and for Prometheus.

    for metric in METRICS:
        metric.of(record)          # 2.31; None where it was not measured

A new number is a field of :class:`~ds_silent.records.StepRecord` and a row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ds_silent.records import StepRecord

_LOSS, _NORM, _COSINE = "loss dispersion", "gradient-norm dispersion", "gradient direction (cosine)"
_NOISE, _AGGREGATED = "noise scale (samples)", "norm of the aggregated gradient"
_INTEGRITY = "integrity of the aggregation"
CHARTS = {"Consistency": (_LOSS, _NORM, _COSINE), "Health": (_NOISE, _AGGREGATED, _INTEGRITY)}
"""Charts in TensorBoard, by category."""


@dataclass(frozen=True)
class Metric:
    """One number of a record, and what it is called in each place; empty where a place does not show it.

    Attributes:
        path: of the field, in a record and in a line of ``metrics.jsonl``.
        column, tag, gauge: in ``watch`` and ``report``, in TensorBoard behind "silent/", in Prometheus behind
            "ds_silent_".
        help: what Prometheus says of it.
        chart: title of the chart in TensorBoard that shows it, see :data:`CHARTS`.
    """

    path: str
    column: str = ""
    tag: str = ""
    gauge: str = ""
    help: str = ""
    chart: str = ""

    def of(self, record: StepRecord) -> float | None:
        """Return the number of a record; of groups of ranks, how many there are."""
        value: Any = attrgetter(self.path)(record)
        return len(value) if isinstance(value, tuple) else value


METRICS = (
    Metric("step", gauge="step", help="Optimizer step of the newest record."),
    Metric("samples", "samples", gauge="samples", help="Rows consumed by all ranks so far."),
    Metric("epoch", "epoch"),
    Metric("world_size", gauge="world_size", help="Data-parallel ranks that are compared."),
    Metric("loss.mean", "loss mean", "loss/mean", "loss_mean", "Mean of the ranks' losses."),
    Metric("loss.std", "loss std", "loss/std", "loss_std", "Standard deviation of the ranks' losses.", _LOSS),
    Metric("loss.range", "", "loss/range", "loss_range", "Largest less smallest loss of the ranks.", _LOSS),
    Metric("grad_norm.mean", "norm mean", "grad_norm/mean", "grad_norm_mean",
           "Mean of the norms of the ranks' gradients before the reduction."),
    Metric("grad_norm.std", "norm std", "grad_norm/std", "grad_norm_std", "Standard deviation of these norms.", _NORM),
    Metric("grad_norm.cv", "", "grad_norm/cv", "grad_norm_cv", "Their standard deviation over their mean.", _NORM),
    Metric("grad_norm.aggregated", "norm aggregated", "grad_norm/aggregated", "grad_norm_aggregated",
           "Norm of the reduced gradient.", _AGGREGATED),
    Metric("direction.mean_cosine", "cosine mean", "direction/mean_cosine", "cosine_mean",
           "Mean cosine between the gradients of two ranks.", _COSINE),
    Metric("direction.min_cosine", "pair min", "direction/min_cosine", "cosine_min", "Smallest such cosine.", _COSINE),
    Metric("direction.max_cosine", "pair max", "direction/max_cosine", "cosine_max", "Largest such cosine.", _COSINE),
    Metric("exact_check", tag="direction/exact_check"),
    Metric("noise_scale", "noise scale", "noise_scale", "noise_scale", "Gradient noise scale, in rows.", _NOISE),
    Metric("coverage.duplicates", "duplicates", "coverage/duplicates", "duplicate_rows",
           "Rows of the step that two or more ranks hold."),
    Metric("coverage.seen", "seen", "coverage/seen"),
    Metric("coverage.repeated", "repeated", "coverage/repeated"),
    Metric("coverage.sampled", "sampled"),
    Metric("integrity.relative_error", "integrity error", "integrity/relative_error", "integrity_relative_error",
           "Distance of the reduced gradient from the mean of the ranks', over its norm.", _INTEGRITY),
    Metric("integrity.rounding_bound", "integrity bound", "integrity/rounding_bound", "integrity_rounding_bound",
           "What rounding explains of this distance.", _INTEGRITY),
    Metric("integrity.replica_groups", tag="integrity/replica_groups"),
    Metric("objective.weight_sum", "label weights", "objective/weight_sum", "label_weight_sum",
           "Weight of the step's labels together in the mean of the ranks' losses: 1 for a mean."),
    Metric("objective.weight_min", "label weight min"),
    Metric("objective.weight_max", "label weight max"),
    Metric("objective.spread", tag="objective/spread", gauge="label_weight_spread",
           help="Largest weight of a label over the smallest."),
    Metric("objective.mean_of_means_angle", "mean of means angle", "objective/mean_of_means_angle"),
    Metric("objective.mean_of_means_angle_error", "mean of means angle error"),
    Metric("seconds.step", "step seconds", gauge="step_seconds", help="Wall time of the optimizer step."),
    Metric("seconds.observe", "observe seconds", gauge="observe_seconds", help="The observer's part of it."),
)  # fmt: skip
"""In the order in which they are shown."""


@dataclass(frozen=True)
class RankMetric:
    """A number that each rank has.

    Attributes:
        name: in tags, and of its column in ``per_rank.bin``.
        path: of the field with the numbers by rank.
        title: of its chart in TensorBoard.
        column, label: in columns of ``report`` and ``watch``, and on the screen.
        heading, unit: of its picture in the report, rank by step.
        ratio: ranks are compared by the ratio to their median, not by the distance from it.
    """

    name: str
    path: str
    title: str
    column: str
    label: str
    heading: str
    unit: str
    ratio: bool = False

    def of(self, record: StepRecord) -> Sequence[float] | None:
        """Return the numbers by rank; None where they were not measured."""
        values: Sequence[float] | None = attrgetter(self.path)(record)
        return values


RANK_METRICS = (
    RankMetric("loss", "loss.per_rank", "loss", "loss", "loss", "Loss", "loss − median of the ranks"),
    RankMetric("grad_norm", "grad_norm.per_rank", "gradient norm", "norm", "|g|", "Gradient norm",
               "norm / median of the ranks", ratio=True),
    RankMetric("cosine", "direction.per_rank", "cosine with the mean of the others", "cosine", "cosine", "Direction",
               "cosine − median of the ranks"),
)  # fmt: skip
"""In the order of the columns of ``per_rank.bin``."""
