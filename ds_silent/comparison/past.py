"""What the steps that agree have shown of two trainings: how far rounding goes, and what leans.

past = Past(bounds, pairs)
past.learn(apart)                            # of a step that was found to be rounding
past.levels["local"].allowed()
past.bias()                                  # what leans to one side over all steps, though within the bound
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_silent.comparison.differences import Apart, Array, Differences
from ds_silent.comparison.levels import CHAOS, FOLLOWS, HALF, NOISE, Bounds, LeanTest, Level
from ds_silent.comparison.pairing import Pairs

DIVERGED = 10.0  # a loss and a norm over those of the first step
SAME_DIRECTION = 0.95  # cosine, of a gradient that is small and yet no rounding of zero


@dataclass(frozen=True)
class Parting:
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


class Past:
    """See the module docstring.

    Attributes:
        levels: by link.
        unstable: tensors whose update is nothing but rounding.
        weights: how far each tensor's are apart, at the last step.
        own: the largest distance of a training's reduced gradient from its own local ones.
        error: the largest share of an applied gradient that is no multiple of the reduced one.
    """

    def __init__(self, bounds: Bounds, pairs: Pairs):
        layers, tensors = len(pairs.layers), len(pairs.tensors)
        growth = NOISE if bounds.precision > HALF else CHAOS
        self._bounds = bounds
        self.levels = {
            "loss": Level(bounds.loss, 1),
            "local": Level(bounds.gradient, layers, growth, bounds.settled),
            "reduced": Level(bounds.gradient, layers, growth, bounds.settled),
            "update": Level(bounds.update, tensors, FOLLOWS),
        }
        self.unstable: set[int] = set()
        self.weights = np.zeros(tensors)
        self.own = self.error = 0.0
        self._start: tuple[float, float] | None = None  # loss and norm of the first step
        self._tests = {name: LeanTest() for name in ("loss", "local", "reduced")}

    @property
    def saturated(self) -> bool:
        """Whether gradients tell nothing any more."""
        return self.levels["local"].saturated or self.levels["reduced"].saturated

    def diverges(self, apart: Differences) -> bool:
        """Whether both trainings are lost: a loss that explodes lets any difference explode with it."""
        steps = (apart.a, apart.b)
        norms = [0.0 if one.local is None else one.local.norm for one in steps]
        sizes = min(abs(one.loss or 0.0) for one in steps), min(norms)
        if not all(map(math.isfinite, sizes)):
            return True
        self._start = self._start or sizes
        return all(size > DIVERGED * start > 0.0 for size, start in zip(sizes, self._start, strict=True))

    def bias(self) -> Parting | None:
        """Return what leans to one side over all steps that agree, the first link of the chain."""
        for link, series in self._tests.items():
            if self.levels[link].saturated:
                continue
            u = self._bounds.precision
            least = max(0.25 * u if u > HALF else 8.0 * u, self._bounds.tolerance)
            leaning = series.leaning(least)
            if leaning is not None:
                which, mean, step = leaning
                places = () if link == "loss" else (which,)
                return Parting(link, places, abs(mean), least, "bias", factor=math.exp(mean), step=step)
        return None

    def learn(self, apart: Differences) -> None:
        """Take in a step that agrees."""
        if apart.loss is not None:
            self.levels["loss"].learn(np.array([apart.loss]))
            self._lean("loss", apart.a.step, np.array([_log(apart.b.loss, apart.a.loss)]))
        for link, gradient in (("local", apart.local), ("reduced", apart.reduced)):
            if gradient is not None:
                rounded = noise(gradient, self._bounds)
                self.levels[link].learn(np.where(rounded, 0.0, gradient.relative))
                with np.errstate(all="ignore"):
                    self._lean(link, apart.a.step, np.where(rounded, 0.0, np.log(gradient.ratio)))
        if apart.weights is not None:
            self.weights = np.nan_to_num(apart.weights)
        if apart.wrong is not None:
            self.own = max(self.own, largest(apart.wrong[0]), largest(apart.wrong[1]))
        if apart.error is not None:
            self.error = max(self.error, *(one for one in apart.error if math.isfinite(one)), 0.0)
        if apart.update is not None:
            values = apart.update.relative.copy()
            values[list(self.unstable)] = 0.0
            self.levels["update"].learn(values)

    def _lean(self, link: str, step: int, values: Array) -> None:
        if not self.levels[link].saturated:
            self._tests[link].add(step, values)


def noise(gradient: Apart, bounds: Bounds) -> npt.NDArray[np.bool_]:
    """Layers whose gradient is nothing but the rounding of zero, as that of a key's bias is."""
    with np.errstate(all="ignore"):
        small = gradient.share * np.fmax(1.0, gradient.ratio) <= 0.25 * bounds.gradient
        same = gradient.cosine > SAME_DIRECTION if bounds.precision > HALF else False  # 16 bits leave larger noise
        return np.asarray(small & ~np.asarray(same))


def largest(values: Array) -> float:
    """The largest finite one; 0 of none."""
    finite = values[np.isfinite(values)]
    return float(finite.max(initial=0.0))


def _log(one: float | None, other: float | None) -> float:
    if one is None or other is None or not (one > 0.0 and other > 0.0):
        return 0.0
    return math.log(one / other)
