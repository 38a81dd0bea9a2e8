"""What the stages hand each other: frozen records of numbers, no behaviour that depends on a rank or a config.

    record = StepRecord(step=12, samples=768, ...)
    json.dumps(to_json(record))            # one line of metrics.jsonl
    json.dumps(to_json(event))             # one line of events.jsonl
    StepRecord.from_json(json.loads(line)) # and back

Two conventions hold for every record: a metric that was not measured is ``None`` (JSON ``null``), never 0; a
number that was measured and is not finite stays what it is and is written as ``"nan"``, ``"inf"`` or ``"-inf"``,
because JSON has no such numbers and a dropped NaN is a hidden fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_silent.json_form import FORMAT as FORMAT
from ds_silent.json_form import from_json as from_json
from ds_silent.json_form import to_json as to_json
from ds_silent.trace import Traced

Method = Literal["exact", "sketch"]
Severity = Literal["info", "warning", "error"]
Dealt = Literal["random", "own-shard", "unknown"]
"""How the rows come to the ranks: dealt to all at random and anew, to each its own again and again, or nobody knows."""
RepairMethod = Literal["retry", "majority", "mean", "dynamic"]
Phase = Literal["started", "ongoing", "ended"]
EventKind = Literal[
    "initial-weights-mismatch",
    "seed-mismatch",
    "same-draws",
    "config-mismatch",
    "objective-mismatch",
    "duplicate-data",
    "data-order-mismatch",
    "low-coverage",
    "same-order",
    "batch-size-mismatch",
    "outlier-rank",
    "non-finite",
    "zero-gradient",
    "unreduced-gradient",
    "aggregation-error",
    "update-mismatch",
    "weights-mismatch",
    "batch-suspect",
    "gradient-changed",
    "replica-drift",
    "drift",
    "repaired",
    "ranks-changed",
    "observer-off",
]
"""What an event is about. More may be added; none is renamed, because records are read by these names."""
SAME_WORK = "do the same work"
"""What a ``duplicate-data`` event says of ranks whose rows are not known to be the same."""
Matrix = tuple[tuple[float, ...], ...]
Extremes = Mapping[int, float]
"""Rank to value, from the lowest value to the highest."""


_IF_KNOWN = {"absent": True}
"""Of a field that is None, and no key, where there is nothing to say."""


@dataclass(frozen=True)
class Quantiles:
    """Of the ranks' values that are numbers; each is the value of a rank, never one between two."""

    min: float
    q10: float
    q25: float
    median: float
    q75: float
    q90: float
    max: float
    nan: int | None = field(default=None, metadata=_IF_KNOWN)  # ranks whose value is no number


@dataclass(frozen=True)
class LossStats:
    """The ranks' losses of one step; each is the unscaled mean over the rank's micro-batches.

    ``quantiles`` and ``extremes``, here and below: what is written instead of ``per_rank`` where the ranks are many,
    see :mod:`ds_silent.sinks.files`.
    """

    mean: float | None = None
    std: float | None = None  # population (ddof 0) over the N ranks
    range: float | None = None  # max - min
    per_rank: tuple[float, ...] | None = None
    quantiles: Quantiles | None = field(default=None, metadata=_IF_KNOWN)
    extremes: Extremes | None = field(default=None, metadata=_IF_KNOWN)


@dataclass(frozen=True)
class GradNormStats:
    """L2 norms of the ranks' local accumulated gradients, unscaled, before aggregation, in fp32."""

    method: Method | None = None
    mean: float | None = None
    std: float | None = None
    cv: float | None = None  # std / mean
    range: float | None = None
    aggregated: float | None = None  # norm of the gradient that came out of the reduction, before clipping
    per_rank: tuple[float, ...] | None = None
    quantiles: Quantiles | None = field(default=None, metadata=_IF_KNOWN)
    extremes: Extremes | None = field(default=None, metadata=_IF_KNOWN)


@dataclass(frozen=True)
class DirectionStats:
    """Cosines between the ranks' local gradients, before aggregation."""

    method: Method | None = None
    mean_cosine: float | None = None  # over all pairs i < j
    standard_error: float | None = None  # of mean_cosine, from the sketch; 0.0 when exact
    min_cosine: float | None = None
    max_cosine: float | None = None
    min_pair: tuple[int, int] | None = None
    max_pair: tuple[int, int] | None = None
    per_rank: tuple[float, ...] | None = None  # cosine of each rank with the mean of the others
    quantiles: Quantiles | None = field(default=None, metadata=_IF_KNOWN)
    extremes: Extremes | None = field(default=None, metadata=_IF_KNOWN)


@dataclass(frozen=True)
class CoverageStats:
    """Rows that two or more ranks hold in this step; shares of the epoch seen once and seen again.

    Where nobody knows how many rows an epoch has, ``seen`` is None and ``repeated`` a share of the rows taken since the
    loader began. With ``sampled`` all three are estimates, from that share of the rows.
    """

    duplicates: int | None = None
    seen: float | None = None
    repeated: float | None = None
    sampled: float | None = field(default=None, metadata=_IF_KNOWN)
    """Share of the rows whose ids were sent, one in 2^m, chosen by the row. None, and no key: all."""
    unsent: int | None = field(default=None, metadata=_IF_KNOWN)
    """Rows of that sample that there was no room for, in the observation of this step."""


@dataclass(frozen=True)
class IntegrityStats:
    """|aggregate - mean of locals| / |mean of locals|, what rounding explains of it, and groups of equal replicas.

    Where the ranks are many, the number of groups and the sizes of the largest are written instead of the groups.
    """

    relative_error: float | None = None
    rounding_bound: float | None = None
    replica_groups: tuple[tuple[int, ...], ...] | None = None
    replica_group_count: int | None = field(default=None, metadata=_IF_KNOWN)
    replica_group_sizes: tuple[int, ...] | None = field(default=None, metadata=_IF_KNOWN)


@dataclass(frozen=True)
class ObjectiveStats:
    """How much the labels of a step count in the mean of the ranks' losses, from the graph that backward begins with.

    ``weight_sum`` is 1 for a mean over the labels, whatever their number. All are None where ``known`` is not true: on
    some rank nobody can read it, as in a fused or a compiled loss.

    The angle is also None where a rank's own labels do not weigh alike, beside another term, for class weights, and
    above the gather limit.
    """

    weight_sum: float | None = None  # of all labels of all ranks
    weight_min: float | None = None  # of one label
    weight_max: float | None = None
    labels: int | None = None
    known: bool | None = None  # None: nobody has looked
    mean_of_means_angle: float | None = None  # degrees from the ranks' mean to the mean over all labels of all ranks
    mean_of_means_angle_error: float | None = None  # its standard error, from the sketch; 0.0 when exact

    @property
    def spread(self) -> float | None:
        """How many times the label that counts least is the one that counts most."""
        return self.weight_max / self.weight_min if self.weight_min and self.weight_max is not None else None


@dataclass(frozen=True)
class Seconds:
    """Wall time on the writing rank: of the whole optimizer step, and of the observer's part before the optimizer.

    What its hooks add to forward and backward is not timed.
    """

    step: float | None = None
    observe: float | None = None


@dataclass(frozen=True)
class LayerStats:
    """Gradient statistics of one layer over the ranks (``direction.per_layer``)."""

    name: str
    mean_norm: float
    norm_cv: float
    mean_cosine: float
    standard_error: float


@dataclass(frozen=True)
class DataDealt:
    """How the rows come to the ranks, and by what that is known: ``data`` of ``run.json``."""

    dealt: Dealt = "unknown"
    by: str = "no step was measured"

    @property
    def sentence(self) -> str:
        """For people, without a full stop."""
        return f"{_DEALT.get(self.dealt, self.dealt)} ({self.by})"


def declared(dealt: Dealt | None) -> DataDealt | None:
    """Return what the block says of the deal; None where it says nothing."""
    return None if dealt is None else DataDealt(dealt, "detectors.dealt of the block")


_DEALT = {
    "random": "dealt to the ranks at random",
    "own-shard": "each rank its own shard",
    "unknown": "how rows come to the ranks is not known",
}


@dataclass(frozen=True)
class StepRecord:
    """Everything measured at one optimizer step: one line of ``metrics.jsonl``.

    ``cosine_matrix`` (N x N, ranks as rows) and ``layers`` are for the sinks that draw; they are not part of the
    fixed ``metrics.jsonl`` format. ``exact_check`` is the mean cosine by sketch minus the exact one, where both are;
    ``data`` goes to ``run.json``, ``traced`` to ``trace.jsonl``.
    """

    step: int  # the optimizer step, counted from 1
    samples: int  # rows consumed by all ranks so far
    epoch: float | None
    world_size: int
    loss: LossStats = field(default_factory=LossStats)
    grad_norm: GradNormStats = field(default_factory=GradNormStats)
    direction: DirectionStats = field(default_factory=DirectionStats)
    noise_scale: float | None = None  # in samples; negative when the signal is below its own sampling error
    coverage: CoverageStats = field(default_factory=CoverageStats)
    integrity: IntegrityStats = field(default_factory=IntegrityStats)
    objective: ObjectiveStats = field(default_factory=ObjectiveStats, metadata={"added": True})  # older lines lack it
    seconds: Seconds = field(default_factory=Seconds)
    cosine_matrix: Matrix | None = field(default=None, metadata={"json": False})
    layers: tuple[LayerStats, ...] = field(default=(), metadata={"json": False})
    exact_check: float | None = field(default=None, metadata={"json": False})
    data: DataDealt | None = field(default=None, metadata={"json": False})
    traced: Traced | None = field(default=None, compare=False, repr=False, metadata={"json": False})

    @classmethod
    def from_json(cls, value: Any) -> StepRecord:
        """What :func:`to_json` has written; see :func:`from_json`."""
        return from_json(cls, value)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: one entry of ``ranks.json``, and of the events that name the rank."""

    rank: int
    global_rank: int  # as the whole training counts its ranks
    host: str
    local_rank: int | None  # on its host, as the launcher counts; None where it does not say
    device: str  # "cuda:3", as the process counts its devices
    serial: str | None  # of the device, where it tells
    group: str | None = field(default=None, metadata=_IF_KNOWN)  # of hosts, where the user has given a map


@dataclass(frozen=True)
class Event:
    """Something that a person should know: one line of ``events.jsonl``."""

    step: int
    kind: EventKind
    severity: Severity
    ranks: tuple[int, ...]
    where: str | None
    score: float | None
    threshold: float | None
    message: str
    remedy: str
    false_alarms_per_million_steps: float | None = field(default=None, metadata=_IF_KNOWN)
    """Where chance is judged: the stated rate at which this would just still be told. None, and no key: a fact."""
    global_ranks: tuple[int, ...] | None = field(default=None, metadata=_IF_KNOWN)
    """``ranks``, as the whole training counts them. None, and no key: the group that is observed is all of it."""
    ranks_total: int | None = field(default=None, metadata=_IF_KNOWN)
    """How many ranks the event is about, where so many are that ``ranks`` is written as the first of them only."""
    places: tuple[Place, ...] | None = field(default=None, metadata=_IF_KNOWN)
    """Of the first ranks of ``ranks``, where not all ranks of the training are meant."""
    effect: float | None = field(default=None, metadata=_IF_KNOWN)
    """How large what is wrong is, as a ratio to what is usual. None, and no key: not known, or no such number."""
    phase: Phase | None = field(default=None, metadata=_IF_KNOWN)
    """Whether this reports the start of a fault, a reminder or the end. None, and no key: not a fault that goes on."""
    follows: str | None = field(default=None, metadata=_IF_KNOWN)
    """The kind of the open fault that brings this one about, and its place: ``config-mismatch (learning rate)``."""

    @classmethod
    def from_json(cls, value: Any) -> Event:
        """What :func:`to_json` has written; see :func:`from_json`."""
        return from_json(cls, value)


@dataclass(frozen=True)
class CosineMatrix:
    """The cosines between the ranks' gradients at a step at which they are drawn: one line of ``matrices.jsonl``."""

    step: int
    method: Method | None
    cosines: Matrix  # N x N, ranks as rows


@dataclass(frozen=True)
class Score:
    """How near one detector was to saying something: it does when the score reaches the threshold."""

    detector: str
    score: float
    threshold: float
    rank: int | None = field(default=None, metadata=_IF_KNOWN)  # whose score it is, the largest of the ranks'
    where: str | None = field(default=None, metadata=_IF_KNOWN)  # which of several numbers was judged


@dataclass(frozen=True)
class Scores:
    """What the detectors that judge by evidence saw at one step: one line of ``scores.jsonl``.

    A detector that had nothing to judge at this step is not among them.
    """

    step: int
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Repair:
    """One act of :mod:`ds_silent.respond.responder`, and its cost.

    ``done``: a check afterwards found everything right; else the fault is still there.
    """

    step: int
    method: RepairMethod
    done: bool
    attempts: int
    bytes: int  # that a rank sent into the act's collectives, without the small ones of the checks
    seconds: float
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # that were given other bits
    error: float | None = None  # of the reduction, afterwards
    bound: float | None = None
    next_interval: int | None = None  # steps from a dynamic averaging's comparison to the next
