"""Do all ranks train for the same objective? From what they read of their graphs; the same on every rank. Pure.

    same = same.of(known)        # once per observation, in order
    same.parts                   # ranks by their objective, where they differ; None where they do not

Another loss, another reduction, another chain of operations is a fact at its first step. Another number between loss
and root is one, too, where it multiplies a mean by a simple ratio (1/4, 2, 193): a script has forgotten something or
done it twice. Else a number may come of a rank's rows, as a count of them does: it differs in health where it goes with
a count that is known (labels) or changes from step to step; so it must stay as it is for ``UNCHANGED`` micro-batches.
Ranks that differ now and then, each time anew, do so by design (a task drawn by each rank): after ``MOST_TURNS`` of
them only what stays is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_silent.capture.objective import MEAN
from ds_silent.distributed.parts import Parts, parts_of
from ds_silent.exchange.observation import Gathered

UNCHANGED = 8  # micro-batches
MOST_TURNS = 3
LARGEST = 64  # numerator or denominator of a simple ratio, but for powers of two
NEAR = 1e-5  # of two numbers of fp32 that are one

_Pattern = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SameObjective:
    """What is known of it.

    Attributes:
        parts: ranks by objective, the largest part first; None where they do not differ, or nobody can say.
        structural: whether the operations differ, and not only their numbers.
    """

    parts: Parts | None = None
    structural: bool = False
    pattern: _Pattern = ()  # of the newest difference
    unchanged: int = 0  # micro-batches since it is so
    turns: int = 0  # differences so far

    def of(self, known: Gathered) -> SameObjective:
        """With one observation more."""
        chains = known.code.objective.tolist()
        if not all(chains):
            return replace(self, parts=None, pattern=(), unchanged=0)
        structural = len(set(chains)) > 1
        values = [(chain,) for chain in chains] if structural else _numbers(known)
        parts = parts_of(_representatives(values))
        if len(parts) == 1 or (not structural and _explained(known)):
            return replace(self, parts=None, pattern=(), unchanged=0)
        pattern = tuple(values) if structural else _ratios(values, parts)
        same = pattern == self.pattern
        micro_batches = int(known.objective.count.min())
        unchanged = micro_batches + (self.unchanged if same else 0)
        turns = self.turns + (not same)
        certain = structural or (bool((known.objective.reduction == MEAN).all()) and _simple(values, parts))
        say = unchanged >= UNCHANGED or (certain and turns <= MOST_TURNS)
        return SameObjective(parts if say else None, structural, pattern, unchanged, turns)


def _numbers(known: Gathered) -> list[tuple[float, ...]]:
    """Of each rank; nothing to compare where a rank's are not known or were several."""
    own = known.objective
    columns = (own.factor.tolist(), own.others.tolist(), own.class_weights.tolist())
    if not all(columns[0]):
        return [(0.0,)] * known.ranks
    return list(zip(*columns, strict=True))


def _representatives(values: Sequence[tuple[float, ...]]) -> list[int]:
    """The first one that each is, but for rounding."""
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
    """Whether the numbers go with the ranks' counts of labels: each label counts alike, or each rank's mean does."""
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
    """What each rank's number is, in those of the largest part: a factor that changes on all ranks alike is none."""
    reference = values[parts[0][0]]
    return tuple((round(value[0] / reference[0], 4), *value[1:]) for value in values)


def _simple(values: Sequence[tuple[float, ...]], parts: Parts) -> bool:
    """Whether every other factor is a small multiple or fraction; the loss's other terms have it, too."""
    reference = values[parts[0][0]]
    for part in parts[1:]:
        ratio = values[part[0]][0] / reference[0]
        times = max(abs(ratio), 1.0 / abs(ratio))
        whole = round(times)
        small = whole <= LARGEST or whole & (whole - 1) == 0
        if not (small and _near((times,), (float(whole),))) or (whole == 1 and ratio > 0):
            return False
    return True
