"""Tell whether all ranks train for the same objective.

    same = same.of(known)                # SameObjective, once per observation, in order; the same on every rank
    same.parts                           # ranks grouped by objective; None where all agree

Another loss, reduction or chain of operations is a fault at its first step. So is another factor on a mean, if it is a
simple ratio of the others' (1/4, 2, 193): the script left something out or did it twice. Any other factor may come from
a rank's rows, such as their count. Healthy factors follow a known count (of labels) or change from step to step, so a
difference is reported only after ``UNCHANGED`` micro-batches without a change. Ranks that differ now and then, each
time anew, do so by design (each rank draws a task): after ``MOST_TURNS`` differences only a lasting one is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_silent.capture.loss_graph import MEAN
from ds_silent.distributed.parts import Parts, parts_of
from ds_silent.exchange.observation import Gathered

UNCHANGED = 8  # micro-batches
MOST_TURNS = 3
LARGEST = 64  # numerator or denominator of a simple ratio; powers of two may be larger
NEAR = 1e-5  # relative difference of fp32 numbers that count as equal

_Pattern = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SameObjective:
    """Hold the evidence on whether all ranks train for the same objective.

    Attributes:
        parts: ranks by objective, the largest part first; None if they agree or it is unknown.
        structural: whether the operations differ, not only their numbers.
    """

    parts: Parts | None = None
    structural: bool = False
    pattern: _Pattern = ()  # the newest difference
    unchanged: int = 0  # micro-batches since it began
    turns: int = 0  # differences so far

    def of(self, known: Gathered) -> SameObjective:
        """Return the evidence with one observation more."""
        chains = known.code.objective.tolist()
        if not all(chains):
            return replace(self, parts=None, pattern=(), unchanged=0)
        structural = len(set(chains)) > 1
        values = [(chain,) for chain in chains] if structural else _numbers(known)
        parts = parts_of(_representatives(values))
        if len(parts) == 1 or (not structural and _explained(known)):
            return replace(self, parts=None, pattern=(), unchanged=0)
        certain = structural or (bool((known.objective.reduction == MEAN).all()) and _simple(values, parts))
        pattern = tuple(values) if structural else _ratios(values, parts)
        return replace(self._seen(known, parts, pattern, certain), structural=structural)

    def of_inputs(self, known: Gathered) -> SameObjective:
        """Return the evidence on the numbers in what the losses are made of, with one observation more."""
        values = known.code.loss_inputs.tolist()
        parts = parts_of(values)
        if len(parts) == 1 or not all(values):
            return replace(self, parts=None, pattern=(), unchanged=0)
        return self._seen(known, parts, tuple((one,) for one in values), False)

    def _seen(self, known: Gathered, parts: Parts, pattern: _Pattern, certain: bool) -> SameObjective:
        """Return the evidence with one difference more; one that is not ``certain`` must stay."""
        same = pattern == self.pattern
        micro_batches = int(known.objective.count.min())
        unchanged = micro_batches + (self.unchanged if same else 0)
        turns = self.turns + (not same)
        say = unchanged >= UNCHANGED or (certain and turns <= MOST_TURNS)
        return SameObjective(parts if say else None, False, pattern, unchanged, turns)


def _numbers(known: Gathered) -> list[tuple[float, ...]]:
    """Return each rank's numbers; equal ones on all ranks if any rank's factor is unknown or not constant."""
    own = known.objective
    columns = (own.factor.tolist(), own.others.tolist(), own.class_weights.tolist())
    if not all(columns[0]):
        return [(0.0,)] * known.ranks
    return list(zip(*columns, strict=True))


def _representatives(values: Sequence[tuple[float, ...]]) -> list[int]:
    """Return for each value the place of the first that equals it up to rounding."""
    found: list[tuple[float, ...]] = []
    places = []
    for value in values:
        place = next((i for i, other in enumerate(found) if _near(value, other)), len(found))
        if place == len(found):
            found.append(value)
        places.append(place)
    return places


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=NEAR) for a, b in zip(one, other, strict=True))


def _explained(known: Gathered) -> bool:
    """Tell whether the factors follow the ranks' label counts: each label counts alike, or each rank's mean."""
    own = known.objective
    if len(set(own.others.tolist())) > 1 or len(set(own.class_weights.tolist())) > 1:
        return False
    factors = own.factor.tolist()
    for counts in (own.labels.tolist(), known.loss.tokens.tolist()):
        if all(counts) and len(set(counts)) > 1:
            shares = [factor / count for factor, count in zip(factors, counts, strict=True)]
            products = [factor * count for factor, count in zip(factors, counts, strict=True)]
            if any(all(_near((one,), (of[0],)) for one in of) for of in (shares, products)):
                return True
    return False


def _ratios(values: Sequence[tuple[float, ...]], parts: Parts) -> _Pattern:
    """Return each rank's factor relative to the largest part's: a change that all ranks share cancels."""
    reference = values[parts[0][0]]
    return tuple((round(value[0] / reference[0], 4), *value[1:]) for value in values)


def _simple(values: Sequence[tuple[float, ...]], parts: Parts) -> bool:
    """Tell whether every other factor is a small multiple or fraction; other terms may differ with it."""
    reference = values[parts[0][0]]
    for part in parts[1:]:
        ratio = values[part[0]][0] / reference[0]
        times = max(abs(ratio), 1.0 / abs(ratio))
        whole = round(times)
        small = whole <= LARGEST or whole & (whole - 1) == 0
        if not (small and _near((times,), (float(whole),))) or (whole == 1 and ratio > 0):
            return False
    return True
