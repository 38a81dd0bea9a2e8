"""Where two trainings part first: what is more than rounding and its growth.

    judge = ChainJudge(bounds, pairs)
    partings = judge.step(apart, first, loaded, after)       # []: the two agree, as far as rounding lets them
    judge.past.bias()                        # after the last step: what leans to one side, though within the bound

A difference is rounding up to what :mod:`ds_silent.comparison.levels` allows. Above ``SATURATED`` two trainings of the
same kind are as far apart as two seeds, and gradients are no longer judged, nor where both losses explode; rows, rates,
the clip factor and each training's own reduction still are.

Rounding can also tip a choice: a ReLU whose input is 0 but for rounding, a router between two experts. What differs
then is small, no multiple, and gone at the next step; such a step is named, and is no parting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ds_silent.comparison.differences import Apart, Array, Differences, Moved, unit_roundoff
from ds_silent.comparison.levels import (
    EARLY_STEPS,
    FIRST_MARGIN,
    FOLLOWS,
    HALF,
    LARGE,
    SATURATED,
    Bounds,
    Parting,
    Past,
    largest,
    noise,
)
from ds_silent.comparison.matching import Pairs

SENSITIVITY = 1000.0  # of a gradient to weights that strayed, both relative; healthy trainings that diverge: up to 300
APART_FROM_OTHERS = 50.0  # of one layer's difference to the median layer's; healthy trainings: up to 12
STRAYED = 1e-3  # of weights at the first step that both have, where it is not the first of the trainings
TIPPED = 0.05  # of the gradient of a layer, that a choice tipped by rounding may be
UPDATE_SHARE = 5.0  # of the gradient's relative error that may be one of the median element's update
LOSS_SHARE = 0.3


@dataclass
class Summary:
    """Of one link over all steps."""

    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    share: float = 0.0  # of what was allowed, where that was largest
    parted: int | None = None  # step of A
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step of A, difference, what was allowed


class ChainJudge:
    """Judges step after step, and remembers what rounding has grown to.

    Attributes:
        summaries: of every link.
        blind: the first step at which gradients were no longer judged.
        past: what the steps before have shown.
        tipped: steps at which a small difference came, and was gone at the next.
    """

    def __init__(self, bounds: Bounds, pairs: Pairs, allowed: Callable[[str, Array], Array] | None = None):
        """``allowed``: returns what a repetition lets a link differ by, from what growth allows."""
        self.bounds, self.pairs = bounds, pairs
        self._allowed = allowed or (lambda link, by_growth: by_growth)
        self.past = Past(bounds, pairs)
        self.summaries: dict[str, Summary] = {}
        self.blind: int | None = None
        self.tipped: list[int] = []
        self.parted = self._found = False  # the second: within this step
        self._step = 0
        self._layer_of = np.array([one.layer for one in pairs.tensors], dtype=int)

    def step(self, apart: Differences, first: bool, loaded: bool, after: Differences | None) -> list[Parting]:
        """Return what parts at this step, in the order of the chain; nothing is learnt of a step that does.

        Args:
            first: it is the first that both have.
            loaded: one of the two went on from a checkpoint right before it.
            after: the next step.
        """
        self._found, before = self.parted, {name: replace(one) for name, one in self.summaries.items()}
        self._step = apart.a.step
        if self.blind is None and self.past.diverges(apart):
            self.blind = apart.a.step
        judged = (
            self._same("rows", apart.rows),
            self._weights(apart, first) if first or loaded else None,
            self._loss(apart),
            self._gradient("local", apart.local, apart.strayed),
            self._reduced(apart),
            self._applied(apart),
            self._update(apart) if apart.update is not None else None,
            self._same("rates", apart.rates),
        )
        findings = [one for one in judged if one is not None]
        if [one.link for one in findings[:2]] == ["update", "rates"]:
            findings = findings[1:]  # it follows from the rate
        if findings and not self.parted and self._tipped(findings[0], apart, after):
            self.summaries = before
            for summary in before.values():
                del summary.curve[summary.compared :]
            self.tipped.append(apart.a.step)
            return []
        for one in findings:
            summary = self.summaries[one.link]
            summary.parted = apart.a.step if summary.parted is None else summary.parted
        if not findings and not self.parted:
            self.past.learn(apart)
        self.parted |= bool(findings)
        if self.past.saturated:
            self.blind = self.blind or apart.a.step + 1
        return findings

    def _tipped(self, finding: Parting, apart: Differences, after: Differences | None) -> bool:
        """Whether rounding has tipped a choice: what differs is small, no multiple, and gone at the next step."""
        if not math.isfinite(finding.size) or finding.link not in ("loss", "local"):
            return False
        if apart.local is None or after is None or after.local is None:
            return False
        size, multiples = _most(apart.local, self.bounds), np.abs(apart.local.cosine)
        worst = int(np.argmax(np.nan_to_num(apart.local.relative)))
        turned = 1.0 - multiples[worst] ** 2 > 0.25 * size**2
        small = size < TIPPED and (finding.link == "local" or finding.size < TIPPED / 5.0)
        gone = _most(after.local, self.bounds) < 0.2 * size
        return bool(small and turned and gone)

    def _note(self, link: str, size: float, allowed: float) -> None:
        summary = self.summaries.setdefault(link, Summary())
        summary.compared += 1
        summary.equal += size == 0.0
        summary.curve.append((self._step, size, allowed))
        if not self._found or (size > allowed and not self.parted):
            summary.largest = max(summary.largest, size)
            summary.share = max(summary.share, size / allowed if allowed else 0.0)

    def _same(self, link: str, same: bool | None) -> Parting | None:
        """Judge rows and rates, in which nothing is rounded."""
        if same is None:
            return None
        self._note(link, float(not same), 0.0)
        self._found |= not same
        return None if same else Parting(link, (), 1.0, 0.0)

    def _weights(self, apart: Differences, first: bool) -> Parting | None:
        if apart.weights is None:
            return None
        digits = np.array([2.0 * max(map(unit_roundoff, one.dtypes)) for one in self.pairs.tensors])
        if first and apart.a.step <= 1:  # the same bits, or the same rounded
            bound = np.where([one.dtypes[0] == one.dtypes[1] for one in self.pairs.tensors], 0.0, digits)
        else:  # each has come to it by its own roundings
            bound = np.maximum(digits, STRAYED if first else FOLLOWS.least * np.maximum(self.past.weights, digits))
        return self._finding("weights", apart.weights, np.maximum(bound, self.bounds.tolerance))

    def _loss(self, apart: Differences) -> Parting | None:
        level = self.past.levels["loss"]
        if apart.loss is None or level.high[0] > SATURATED or self.blind is not None:
            return None
        carried = LOSS_SHARE * self.past.levels["local"].median
        allowed = self._allowed("loss", level.allowed(carried, LOSS_SHARE * SENSITIVITY * apart.strayed))
        return self._finding("loss", np.array([apart.loss]), allowed, everywhere=True)

    def _gradient(
        self, link: str, gradient: Apart | None, strayed: float, coupled: Array | float = 0.0
    ) -> Parting | None:
        level = self.past.levels[link]
        if gradient is None or self.blind is not None or level.saturated:
            return None
        values = np.where(noise(gradient, self.bounds), 0.0, gradient.relative)
        middle = float(np.median(np.nan_to_num(values)))
        explained = min(SENSITIVITY * strayed, APART_FROM_OTHERS * max(middle, self.bounds.gradient))
        explained *= self.bounds.precision <= HALF  # rounding to 16 bits is large at each step, and grows little
        allowed = self._allowed(link, level.allowed(coupled, explained))
        return self._finding(link, values, allowed)

    def _reduced(self, apart: Differences) -> Parting | None:
        if apart.wrong is not None:
            bound = max(FIRST_MARGIN * self.bounds.gradient, 20.0 * self.past.own)
            for culprit, other, name in ((1, 0, "B"), (0, 1, "A")):
                off = apart.wrong[culprit]
                places = np.flatnonzero((off > bound) & (apart.wrong[other] <= bound))
                if len(places):
                    size = float(off[places].max())
                    self._note("reduced", size, bound)
                    self._found = True
                    return Parting("reduced", tuple(map(int, places)), size, bound, "own", culprit=name)
        local = 0.0 if apart.local is None or self._found else apart.local.relative
        coupled = np.where(np.isfinite(local), local, 0.0)
        return self._gradient("reduced", apart.reduced, apart.strayed, coupled)

    def _applied(self, apart: Differences) -> Parting | None:
        if apart.factor is None or apart.error is None:
            return None
        size = abs(apart.factor - 1.0)
        bound = max(FIRST_MARGIN * self.bounds.gradient, 20.0 * self.past.error, 1e-3)
        self._note("applied", size, self.bounds.factor)
        if size > 0.0:
            return Parting("applied", (), size, self.bounds.factor, factor=apart.factor)
        bad = [not one <= bound for one in apart.error]
        if bad[0] != bad[1]:
            return Parting("applied", (), apart.error[bad[1]], bound, "own", culprit="AB"[bad[1]])
        return None

    def _update(self, apart: Differences) -> Parting | None:
        level, moved = self.past.levels["update"], apart.update
        assert moved is not None
        if self.blind is not None or level.saturated:
            return None
        carried = np.zeros(len(moved.relative))
        for link, gradient in (("local", apart.local), ("reduced", apart.reduced)):
            if gradient is not None and not self._found:
                now, past = np.where(np.isfinite(gradient.relative), gradient.relative, 0.0), self.past.levels[link]
                high = np.append(np.maximum(past.high, now), max(past.median, np.median(now)))
                carried = np.maximum(carried, UPDATE_SHARE * high[self._layer_of])
        allowed = self._allowed("update", level.allowed(carried))
        values = moved.relative.copy()
        if level.steps < EARLY_STEPS:
            self.past.unstable |= set(map(int, np.flatnonzero((values > allowed) & moved.unstable)))
        values[list(self.past.unstable)] = 0.0
        found = self._finding("update", values, allowed)
        return found if found is not None or self.parted else self._way(moved)

    def _way(self, moved: Moved) -> Parting | None:
        """What no single update shows, because the weights in use have too few digits for it."""
        values = moved.way.copy()
        values[list(self.past.unstable)] = 0.0
        middle = float(np.median(np.nan_to_num(values)))
        places = np.flatnonzero(values > max(LARGE, APART_FROM_OTHERS * middle))
        if not len(places):
            return None
        self._found = True
        return Parting("update", tuple(map(int, places)), float(values[places].max()), LARGE, "way")

    def _finding(self, link: str, values: Array, allowed: Array, everywhere: bool = False) -> Parting | None:
        allowed = np.broadcast_to(allowed, values.shape)
        with np.errstate(all="ignore"):
            share = np.where(np.isnan(values), 0.0, values / np.maximum(allowed, 1e-300))
        if not len(values):
            return None
        worst = int(np.argmax(share))
        size = 0.0 if math.isnan(values[worst]) else float(values[worst])
        self._note(link, size, float(allowed[worst]))
        self._found |= size > float(allowed[worst])
        places = np.flatnonzero(share > 1.0)
        if not len(places):
            return None
        return Parting(link, () if everywhere else tuple(map(int, places)), size, float(allowed[worst]))


def _most(gradient: Apart, bounds: Bounds) -> float:
    return largest(np.where(noise(gradient, bounds), 0.0, gradient.relative))
