"""Where two trainings part first: what is more than rounding and its growth.

    judge = Judge(bounds, pairs)
    finding = judge.step(apart)              # None: the two agree at this step, as far as rounding lets them
    judge.bias()                             # after the last step: what leans to one side, though within the bound

A difference is rounding up to what :mod:`ds_silent.comparison.levels` allows. Above ``SATURATED`` two trainings of the
same kind are as far apart as two seeds, and gradients are no longer judged, nor where both losses explode; rows, rates,
the clip factor and each training's own reduction still are.

Rounding can also tip a choice: a ReLU whose input is 0 but for rounding, a router between two experts. What differs
then is small, no multiple, and gone at the next step; such a step is named, and is no parting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ds_silent.comparison.differences import Apart, Array, Differences, Moved, unit_roundoff, unlike
from ds_silent.comparison.levels import (
    CHAOS,
    EARLY_STEPS,
    FIRST_MARGIN,
    FOLLOWS,
    HALF,
    LARGE,
    NOISE,
    SATURATED,
    Bounds,
    Envelope,
    Level,
    Series,
)
from ds_silent.comparison.pairing import Pairs

SENSITIVITY = 1000.0  # of a gradient to weights that strayed, both relative; healthy trainings that diverge: up to 300
APART_FROM_OTHERS = 50.0  # of one layer's difference to the median layer's; healthy trainings: up to 12
STRAYED = 1e-3  # of weights at the first step that both have, where it is not the first of the trainings
TIPPED = 0.05  # of the gradient of a layer, that a choice tipped by rounding may be
DIVERGED = 10.0  # a loss and a norm over those of the first step
UPDATE_SHARE = 5.0  # of the gradient's relative error that may be one of the median element's update
LOSS_SHARE = 0.3
SAME_DIRECTION = 0.95  # cosine, of a gradient that is small and yet no rounding of zero


@dataclass(frozen=True)
class Finding:
    """A link that parts at a step.

    Attributes:
        places: of the layers (of the tensors where the link is weights or update) that part, in no order.
        size, allowed: of the one that exceeds most, relative.
        kind: "" for more than is allowed, "bias" for a lean within it, "own" where one training's own reduction or
            applied gradient is wrong.
        culprit: A or B, where one is known to be wrong by itself.
    """

    link: str
    places: tuple[int, ...]
    size: float
    allowed: float
    kind: str = ""
    culprit: str = ""
    factor: float | None = None
    step: int | None = None  # of A, for a bias: where it begins


@dataclass
class Summary:
    """Of one link over all steps."""

    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    share: float = 0.0  # of what was allowed, where that was largest
    parted: int | None = None  # step of A


class Judge:
    """Judges step after step, and remembers what rounding has grown to.

    Attributes:
        summaries: of every link.
        blind: the first step at which gradients were no longer judged.
        unstable: tensors whose update is nothing but rounding.
        tipped: steps at which a small difference came, and was gone at the next.
    """

    def __init__(self, bounds: Bounds, pairs: Pairs, envelope: Envelope | None = None):
        layers, tensors = len(pairs.layers), len(pairs.tensors)
        self.bounds, self.pairs, self.envelope = bounds, pairs, envelope
        gradients = (NOISE, bounds.settled) if bounds.precision > HALF else (CHAOS, bounds.settled)
        self.levels = {
            "loss": Level(bounds.loss, 1),
            "local": Level(bounds.gradient, layers, *gradients),
            "reduced": Level(bounds.gradient, layers, *gradients),
            "update": Level(bounds.update, tensors, FOLLOWS),
        }
        self.summaries: dict[str, Summary] = {}
        self.blind: int | None = None
        self.unstable: set[int] = set()
        self.tipped: list[int] = []
        self.parted = self._found = False  # the second: within this step
        self._weights_apart = np.zeros(tensors)  # at the last step
        self._layer_of = np.array([one.layer for one in pairs.tensors], dtype=int)
        self._start: tuple[float, float] | None = None  # loss and norm of the first step
        self._own = 0.0  # the largest distance of a reduced gradient from its own local ones so far
        self._error = 0.0
        self._series = {name: Series() for name in ("loss", "local", "reduced")}

    def step(self, apart: Differences, first: bool, loaded: bool, after: Differences | None) -> list[Finding]:
        """Return what parts at this step, in the order of the chain; nothing is learnt of a step that does.

        Args:
            first: it is the first that both have.
            loaded: one of the two went on from a checkpoint right before it.
            after: the next step.
        """
        self._found, before = self.parted, {name: replace(one) for name, one in self.summaries.items()}
        if self.blind is None and self._diverges(apart):
            self.blind = apart.a.step
        found = [
            self._rows(apart),
            self._weights(apart, first) if first or loaded else None,
            self._loss(apart),
            self._gradient("local", apart.local, apart.strayed),
            self._reduced(apart),
            self._applied(apart),
            self._update(apart) if apart.update is not None else None,
            self._rates(apart),
        ]
        findings = [one for one in found if one is not None]
        if [one.link for one in findings[:2]] == ["update", "rates"]:
            findings = findings[1:]  # it follows from the rate
        if findings and not self.parted and self._tipped(findings[0], apart, after):
            self.summaries = before
            self.tipped.append(apart.a.step)
            return []
        for one in findings:
            summary = self.summaries[one.link]
            summary.parted = apart.a.step if summary.parted is None else summary.parted
        if not findings and not self.parted:
            self._learn(apart)
        self.parted |= bool(findings)
        if self.levels["local"].saturated or self.levels["reduced"].saturated:
            self.blind = self.blind or apart.a.step + 1
        return findings

    def _tipped(self, finding: Finding, apart: Differences, after: Differences | None) -> bool:
        """Whether rounding has tipped a choice: what differs is small, no multiple, and gone at the next step."""
        if finding.link not in ("loss", "local") or apart.local is None or after is None or after.local is None:
            return False
        size, multiples = _most(apart.local, self.bounds), np.abs(apart.local.cosine)
        worst = int(np.argmax(np.nan_to_num(apart.local.relative)))
        turned = 1.0 - multiples[worst] ** 2 > 0.25 * size**2
        small = size < TIPPED and (finding.link == "local" or finding.size < TIPPED / 5.0)
        gone = _most(after.local, self.bounds) < 0.2 * size
        return bool(small and turned and gone)

    def _diverges(self, apart: Differences) -> bool:
        """Whether both trainings are lost: a loss that explodes lets any difference explode with it."""
        steps = (apart.a, apart.b)
        norms = [0.0 if one.local is None else one.local.norm for one in steps]
        sizes = min(abs(one.loss or 0.0) for one in steps), min(norms)
        if not all(map(math.isfinite, sizes)):
            return True
        self._start = self._start or sizes
        return all(size > DIVERGED * start > 0.0 for size, start in zip(sizes, self._start, strict=True))

    def bias(self) -> Finding | None:
        """Return what leans to one side over all steps that agree, the first link of the chain."""
        for link, series in self._series.items():
            level = self.levels.get(link)
            if level is None or level.saturated:
                continue
            u = self.bounds.precision
            least = 0.25 * u if u > HALF else 8.0 * u
            leaning = series.leaning(least)
            if leaning is not None:
                which, mean, step = leaning
                places = () if link == "loss" else (which,)
                return Finding(link, places, abs(mean), least, "bias", factor=math.exp(mean), step=step)
        return None

    def _learn(self, apart: Differences) -> None:
        if apart.loss is not None:
            self.levels["loss"].learn(np.array([apart.loss]))
            self._lean("loss", apart.a.step, np.array([_log(apart.b.loss, apart.a.loss)]))
        for link, gradient in (("local", apart.local), ("reduced", apart.reduced)):
            if gradient is not None:
                noise = _noise(gradient, self.bounds)
                self.levels[link].learn(np.where(noise, 0.0, gradient.relative))
                with np.errstate(all="ignore"):
                    self._lean(link, apart.a.step, np.where(noise, 0.0, np.log(gradient.ratio)))
        if apart.weights is not None:
            self._weights_apart = np.nan_to_num(apart.weights)
        if apart.wrong is not None:
            self._own = max(self._own, _largest(apart.wrong[0]), _largest(apart.wrong[1]))
        if apart.error is not None:
            self._error = max(self._error, *(one for one in apart.error if math.isfinite(one)), 0.0)
        if apart.update is not None:
            values = apart.update.relative.copy()
            values[list(self.unstable)] = 0.0
            self.levels["update"].learn(values)

    def _lean(self, link: str, step: int, values: Array) -> None:
        if not self.levels[link].saturated:
            self._series[link].add(step, values)

    def _note(self, link: str, size: float, allowed: float) -> None:
        summary = self.summaries.setdefault(link, Summary())
        summary.compared += 1
        summary.equal += size == 0.0
        if not self._found or (size > allowed and not self.parted):
            summary.largest = max(summary.largest, size)
            summary.share = max(summary.share, size / allowed if allowed else 0.0)

    def _rows(self, apart: Differences) -> Finding | None:
        if apart.rows is None:
            return None
        self._note("rows", float(not apart.rows), 0.0)
        self._found |= not apart.rows
        return None if apart.rows else Finding("rows", (), 1.0, 0.0)

    def _weights(self, apart: Differences, first: bool) -> Finding | None:
        if apart.weights is None:
            return None
        digits = np.array([2.0 * max(map(unit_roundoff, one.dtypes)) for one in self.pairs.tensors])
        if first and apart.a.step <= 1:  # the same bits, or the same rounded
            bound = np.where([one.dtypes[0] == one.dtypes[1] for one in self.pairs.tensors], 0.0, digits)
        else:  # each has come to it by its own roundings
            bound = np.maximum(digits, STRAYED if first else FOLLOWS.least * np.maximum(self._weights_apart, digits))
        return self._finding("weights", apart.weights, np.maximum(bound, self.bounds.weights))

    def _loss(self, apart: Differences) -> Finding | None:
        level = self.levels["loss"]
        if apart.loss is None or level.high[0] > SATURATED or self.blind is not None:
            return None
        carried = LOSS_SHARE * self.levels["local"].median
        allowed = self._allowed("loss", level.allowed(carried, LOSS_SHARE * SENSITIVITY * apart.strayed))
        return self._finding("loss", np.array([apart.loss]), allowed, everywhere=True)

    def _gradient(
        self, link: str, gradient: Apart | None, strayed: float, coupled: Array | float = 0.0
    ) -> Finding | None:
        level = self.levels[link]
        if gradient is None or self.blind is not None or level.saturated:
            return None
        values = np.where(_noise(gradient, self.bounds), 0.0, gradient.relative)
        middle = float(np.median(np.nan_to_num(values)))
        explained = min(SENSITIVITY * strayed, APART_FROM_OTHERS * max(middle, self.bounds.gradient))
        explained *= self.bounds.precision <= HALF  # rounding to 16 bits is large at each step, and grows little
        allowed = self._allowed(link, level.allowed(coupled, explained))
        return self._finding(link, values, allowed)

    def _reduced(self, apart: Differences) -> Finding | None:
        if apart.wrong is not None:
            bound = max(FIRST_MARGIN * self.bounds.gradient, 20.0 * self._own)
            for culprit, other, name in ((1, 0, "B"), (0, 1, "A")):
                off = apart.wrong[culprit]
                places = np.flatnonzero((off > bound) & (apart.wrong[other] <= bound))
                if len(places):
                    self._note("reduced", float(off[places].max()), bound)
                    self._found = True
                    return Finding(
                        "reduced", tuple(map(int, places)), float(off[places].max()), bound, "own", culprit=name
                    )
        local = 0.0 if apart.local is None or self._found else apart.local.relative
        coupled = np.where(np.isfinite(local), local, 0.0)
        return self._gradient("reduced", apart.reduced, apart.strayed, coupled)

    def _applied(self, apart: Differences) -> Finding | None:
        if apart.factor is None or apart.error is None:
            return None
        size = abs(apart.factor - 1.0)
        bound = max(FIRST_MARGIN * self.bounds.gradient, 20.0 * self._error, 1e-3)
        self._note("applied", size, self.bounds.factor)
        if size > 0.0:
            return Finding("applied", (), size, self.bounds.factor, factor=apart.factor)
        bad = [not one <= bound for one in apart.error]
        if bad[0] != bad[1]:
            return Finding("applied", (), apart.error[bad[1]], bound, "own", culprit="AB"[bad[1]])
        return None

    def _update(self, apart: Differences) -> Finding | None:
        level, moved = self.levels["update"], apart.update
        assert moved is not None
        if self.blind is not None or level.saturated:
            return None
        carried = np.zeros(len(moved.relative))
        for link, gradient in (("local", apart.local), ("reduced", apart.reduced)):
            if gradient is not None and not self._found:
                now = np.where(np.isfinite(gradient.relative), gradient.relative, 0.0)
                high = np.append(np.maximum(self.levels[link].high, now), max(self.levels[link].median, np.median(now)))
                carried = np.maximum(carried, UPDATE_SHARE * high[self._layer_of])
        allowed = self._allowed("update", level.allowed(carried))
        values = moved.relative.copy()
        if level.steps < EARLY_STEPS:
            self.unstable |= set(map(int, np.flatnonzero((values > allowed) & _unstable(moved))))
        values[list(self.unstable)] = 0.0
        found = self._finding("update", values, allowed)
        return found if found is not None or self.parted else self._way(moved)

    def _way(self, moved: Moved) -> Finding | None:
        """What no single update shows, because the weights in use have too few digits for it."""
        values = moved.way.copy()
        values[list(self.unstable)] = 0.0
        middle = float(np.median(np.nan_to_num(values)))
        places = np.flatnonzero(values > max(LARGE, APART_FROM_OTHERS * middle))
        if not len(places):
            return None
        self._found = True
        return Finding("update", tuple(map(int, places)), float(values[places].max()), LARGE, "way")

    def _rates(self, apart: Differences) -> Finding | None:
        if apart.rates is None:
            return None
        self._note("rates", float(not apart.rates), 0.0)
        return None if apart.rates else Finding("rates", (), 1.0, 0.0)

    def _allowed(self, link: str, by_growth: Array) -> Array:
        return by_growth if self.envelope is None else self.envelope.allowed(link, by_growth)

    def _finding(self, link: str, values: Array, allowed: Array, everywhere: bool = False) -> Finding | None:
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
        return Finding(link, () if everywhere else tuple(map(int, places)), size, float(allowed[worst]))


def _noise(gradient: Apart, bounds: Bounds) -> npt.NDArray[np.bool_]:
    """Layers whose gradient is nothing but the rounding of zero, as that of a key's bias is."""
    with np.errstate(all="ignore"):
        small = gradient.share * np.fmax(1.0, gradient.ratio) <= 0.25 * bounds.gradient
        return np.asarray(small & ~(gradient.cosine > SAME_DIRECTION))


def _most(gradient: Apart, bounds: Bounds) -> float:
    return _largest(np.where(_noise(gradient, bounds), 0.0, gradient.relative))


def _unstable(moved: Moved) -> npt.NDArray[np.bool_]:
    """Tensors that move as far in both trainings, and each in a direction of its own."""
    pairs = zip(*moved.size, moved.correlation, strict=True)
    return np.array([unlike(*one) for one in pairs], dtype=bool)


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max(initial=0.0))


def _log(one: float | None, other: float | None) -> float:
    if one is None or other is None or not (one > 0.0 and other > 0.0):
        return 0.0
    return math.log(one / other)
