"""What the detectors see besides the record, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ds_silent.capture.conduct import Unlike
from ds_silent.measure.evidence import ReductionEvidence
from ds_silent.measure.recent_rows import OwnPasses
from ds_silent.measure.same_order import OrderAgain
from ds_silent.records import Dealt, Event, EventKind, Severity


@dataclass(frozen=True)
class Coverage:
    """The current epoch so far, over all ranks; shares of the epoch's rows.

    ``epoch`` is what was consumed (1.0 = as many rows as the epoch has), ``seen`` what was visited at least once,
    ``repeated`` what was consumed although it had been seen in this epoch: epoch = seen + repeated, but for the rows
    that a sampler fills the epoch up with.
    """

    epoch: float
    seen: float
    repeated: float
    rows: int  # of one epoch
    error: float = 0.0  # standard error of the shares, where they come from a sketch
    told: bool = True  # by ids; else rows are known by their content, and those that the data hold twice are one
    sampled: float = 1.0  # share of the rows that are known, by which the others are estimated


@dataclass(frozen=True)
class LayerValues:
    """What the ranks' gradients are layer by layer; NaN where it is not known."""

    names: tuple[str, ...]
    log_norms: npt.NDArray[np.float64]  # (N, L), minus infinity for a layer without gradient
    cosines: npt.NDArray[np.float64] | None  # (N, L) with the other ranks' mean; None where no sketches were sent


@dataclass(frozen=True)
class Evidence:
    """What a :class:`~ds_silent.records.StepRecord` lacks; None (or an empty mapping) is "not known" or "none"."""

    duplicates: Mapping[tuple[int, int], int] | None = None  # rows that ranks i < j both hold in this step
    rows_per_rank: tuple[int, ...] | None = None  # rows of this step
    own_rows: tuple[int, ...] | None = None  # rows since the last measured step, per rank
    own_repeats: tuple[int, ...] | None = None  # those of own_rows that the same rank had taken just before
    passes: OwnPasses | None = None  # what tells those of a small shard of its own
    rows_taken: tuple[int, ...] | None = None  # the same as own_rows, and those that were not sent
    rows_sampled: float = 1.0  # share of the rows that are sent: all counts of rows but rows_taken are of those
    dealt: Dealt = "unknown"  # the ranks are exchangeable only where this is "random"
    label_tokens: tuple[int, ...] | None = None  # tokens with a label, of this step
    coverage: Coverage | None = None
    same_order: OrderAgain | None = None  # an earlier epoch's order has come again, or has not
    non_finite: Mapping[int, str | None] = field(default_factory=dict)  # rank → layer where it began, if known
    zero_gradient: Mapping[int, str | None] = field(default_factory=dict)  # rank → first layer without gradient
    stale_parameters: tuple[int, ...] | None = None  # trainable, without gradient here, with one on another rank
    reduction: ReductionEvidence | None = None  # of the reduction, the optimizer's input and the replicas
    unlike: tuple[Unlike, ...] = ()  # what the ranks' code does not do alike
    layers: LayerValues | None = None  # of the ranks' own gradients
    directions: npt.NDArray[np.float64] | None = None  # (N, P) a few numbers of each rank's, where no pairs are known
    step_skipped: bool = False  # fp16: the dynamic loss scale was too high and the step was not applied, as designed
    update_skipped: bool = False  # the optimizer did not apply the step, whatever the reason
    micro_batches: tuple[int, ...] | None = None  # losses that each rank took this step


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a detector sees at this step. Whether it becomes an event is decided in ``episodes.py``."""

    key: str  # the same for the same fault at every step
    kind: EventKind
    severity: Severity
    ranks: tuple[int, ...]
    where: str | None = None
    score: float | None = None
    threshold: float | None = None
    message: str
    remedy: str
    since: int
    step: int | None = None  # of the event, where the finding is about an earlier step than the newest
    effects: tuple[str, ...] = ()  # what it brings about by itself on the same ranks, see ``linked``
    guess: str = ""  # the part of the message about the likely cause: nothing to guess where the cause is known
    log_excess: float | None = None  # where chance is judged: nats by which the evidence exceeds what is asked for
    effect: float | None = None  # how large, as a ratio to what is usual


def with_odds(event: Event, rate: float, log_excess: float) -> Event:
    """The event with its odds, as a number and in words.

    A threshold is log(1 / rate) and what does not depend on the rate; so evidence that exceeds it by x would just still
    be told at a rate e^x times smaller.

    Args:
        rate: stated false alarms per million steps.
        log_excess: nats by which the evidence exceeds what this rate asks for.
    """
    odds = math.exp(max(math.log(rate) - max(0.0, log_excess), math.log(_SMALLEST)))
    message = f"{event.message} By chance alone: at most once in {_many(1e6 / odds)} steps."
    return replace(event, message=message, false_alarms_per_million_steps=odds)


_SMALLEST = 1e-290  # false alarms per million steps
_POWERS = ("", "thousand", "million", "billion", "trillion")


def _many(steps: float) -> str:
    """Rounded down to a power of ten, in words: no reader compares its digits."""
    exponent = math.floor(math.log10(max(1.0, steps)) + 1e-9)
    if exponent >= 3 * len(_POWERS):
        return "more than a thousand trillion"
    count, power = ("one", "ten", "a hundred")[exponent % 3], _POWERS[exponent // 3]
    return f"{'a' if count == 'one' and power else count} {power}".strip()


def named(ranks: tuple[int, ...], world_size: int | None = None) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0, 1 and 2``, ``all 4 ranks``."""
    if world_size is not None and len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ranks if len(ranks) <= 8 else ranks[:7]
    last = str(shown[-1]) if len(ranks) <= 8 else f"{len(ranks) - 7} more"
    first = shown[:-1] if len(ranks) <= 8 else shown
    return f"ranks {', '.join(map(str, first))} and {last}"
