"""How far two trainings may be apart: the bound of rounding, what it grows to, and what leans within it.

    past = Past(bounds, pairs)
    past.levels["local"].allowed()               # (layers,) relative differences that this step may have
    past.learn(apart)                            # of a step that was found to be rounding
    past.bias()                                  # what leans to one side over all steps, though within the bound

**What is allowed.** At the first step both trainings have the same weights, and what differs is rounding: a multiple of
the coarser unit roundoff, which the head of each trace states. An update carries it into the weights, and the trainings
grow apart, each step by about the same factor. So the difference of a step is held against the largest one before it,
times a factor: some times the largest growth of one step that this very pair has shown (:class:`Growth`). A layer may
always differ as much as the median layer has. With a repetition of A, what A and its repetition differ by takes the
place of that growth.

**What leans.** Rounding has no side. A norm that is larger in B at nearly every step, by the same share and by more
than it scatters, is a bias though it is within the bound. Trainings that grow apart lean too, but gradually: a bias
comes at once, and both halves of the steps behind it lean alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ds_silent.comparison.differences import Apart, Array, Differences, unit_roundoff
from ds_silent.comparison.matching import Pairs
from ds_silent.trace import Head

EARLY_STEPS = 3
MARGIN = 5.0  # over a repetition's envelope
FIRST_MARGIN = 3.0  # over the bound, at the first step
LARGE, SATURATED = 0.3, 0.3  # relative differences that are no rounding, and that tell nothing any more
UPDATE_BOUND = 1e-5  # of an update in fp32, relative
LEAST_STEPS, LEANING, STEADY = 24, 4.0, 0.2  # of the test of a bias: steps, mean over deviation, halves over mean
BEFORE = 6  # steps ahead of it, which do not lean
ONE_SIDE = 0.98  # of the steps; trainings in bf16 with another number of ranks: up to 0.8
HALF = 1e-4  # a unit roundoff above it is that of 16 bits
FACTOR_BOUND = 1e-4  # of a clip factor
MOST_GROWTH = 100.0
DIVERGED = 10.0  # a loss and a norm over those of the first step
SAME_DIRECTION = 0.95  # cosine, of a gradient that is small and yet no rounding of zero


@dataclass(frozen=True)
class Bounds:
    """What rounding explains at the first step, relative."""

    gradient: float
    loss: float
    update: float
    factor: float
    tolerance: float  # that was asked for, of everything; of weights beyond the digits of two dtypes
    precision: float  # unit roundoff
    settled: float  # of the gradient, once a step has been seen


def bounds_of(a: Head, b: Head, tolerance: float | None) -> Bounds:
    """Take the coarser of the two trainings' arithmetic; ``tolerance`` widens every bound to at least that."""
    u = max(max(map(unit_roundoff, _precisions(head))) for head in (a, b))
    stated = max(head.rounding or 0.0 for head in (a, b))
    half = u > HALF
    gradient = max(4.0 * u, 2.0 * stated) if half else max(32.0 * u, 8.0 * stated)
    least = tolerance or 0.0
    return Bounds(
        max(gradient, least),
        max(u if half else 8.0 * u, least),
        max(UPDATE_BOUND if not half else 4.0 * u, least),
        max(FACTOR_BOUND, 8.0 * u, least),
        least,
        u,
        max(u if half else gradient, least),
    )


def _precisions(head: Head) -> list[str]:
    """Dtypes that the forward, the backward or the reduction may have rounded to."""
    found = [head.precision, *(one.dtype for one in head.tensors)]
    for name, setting in head.settings.items():
        value = setting.get("value") if isinstance(setting, Mapping) else None
        if isinstance(value, str) and any(word in name for word in ("autocast", "communication_data_type")):
            found += [part.strip() for part in value.split(",")]
    return found


@dataclass(frozen=True)
class Growth:
    """How much further apart two trainings may be at one step than at all before it.

    Attributes:
        least: of what is allowed; :data:`MOST_GROWTH` is the most.
        early: while little growth has been seen.
        margin: over the largest growth of one step that has been seen.
    """

    least: float
    early: float
    margin: float


CHAOS = Growth(least=8.0, early=100.0, margin=5.0)
"""Of rounding in fp32, which is far below what moves a training, so that it may grow for long."""
NOISE = Growth(least=7.5, early=20.0, margin=4.0)
"""Of rounding in 16 bits, which is as large at each step, whatever the ones before have left."""
FOLLOWS = Growth(least=8.0, early=8.0, margin=5.0)
"""Of an update, which grows as its gradient does."""


class Level:
    """How far the two may be apart at a step, for several numbers of one kind (layers, tensors, or one alone).

    Args:
        bound: what rounding explains at the first step.
        count: of the numbers.
        growth: that is allowed from step to step.
        settled: what rounding explains at least, once a step has been seen; as a rule the bound.
    """

    def __init__(self, bound: float, count: int, growth: Growth = CHAOS, settled: float | None = None):
        self.bound, self._allows = bound, growth
        self._settled = bound if settled is None else settled
        self.high = np.zeros(count)  # the largest so far
        self.median = 0.0
        self.growth = 1.0  # the largest of one step
        self.steps = 0

    def allowed(self, coupled: Array | float = 0.0, at_least: float = 0.0) -> Array:
        """Return it for each.

        Args:
            coupled: what an earlier link of this step explains, and what grows as these numbers do.
            at_least: what the weights, which have come apart before this step, explain.
        """
        if not self.steps:
            return np.maximum(FIRST_MARGIN * np.maximum(self.bound, coupled), at_least) * np.ones_like(self.high)
        level, allows = np.maximum(self._known(), coupled), self._allows
        grown = min(MOST_GROWTH, max(allows.least, allows.margin * self.growth))
        factor = allows.early if self.steps < EARLY_STEPS else grown
        most = np.maximum(LARGE * self.growth, 3.0 * level)
        return np.minimum(np.maximum(factor * level, at_least), most)

    def _known(self) -> Array:
        return np.maximum(np.maximum(self.high, self.median), self._settled)

    def learn(self, values: Array) -> None:
        """Take a step in that was found to be rounding."""
        values = np.where(np.isfinite(values), values, 0.0)
        if self.steps:
            self.growth = max(self.growth, float((values / self._known()).max(initial=0.0)))
        self.high = np.maximum(self.high, values)
        if len(values):
            self.median = max(self.median, float(np.median(values)))
        self.steps += 1

    @property
    def saturated(self) -> bool:
        return self.median > SATURATED


class LeanTest:
    """Numbers of one kind over the steps, for the test of a bias."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[Array] = []

    def add(self, step: int, values: Array) -> None:
        """Take in a step's; what cannot be known is no lean."""
        self._steps.append(step)
        self._values.append(np.where(np.isfinite(values), values, 0.0))

    def leaning(self, least: float) -> tuple[int, float, int] | None:
        """Return (which, mean, first step) of the number that leans most, where one does at all."""
        if len(self._values) < LEAST_STEPS:
            return None
        table = np.array(self._values)
        found: tuple[int, float, int] | None = None
        for which in np.flatnonzero(np.abs(np.median(table, 0)) > least):
            begin = _begin(table[:, which])
            tail = table[begin:, which]
            mean, half = float(tail.mean()), len(tail) // 2
            deviation = float(tail.std(ddof=1))
            halves = tail[:half].mean(), tail[half:].mean()
            one_side = float((np.sign(tail) == np.sign(mean)).mean())
            ahead = table[max(0, begin - BEFORE) : begin, which]
            steady = max(abs(halves[0] - halves[1]), abs(ahead.mean()) if begin else 0.0)
            leans = abs(mean) > max(least, LEANING * deviation) and one_side >= ONE_SIDE
            if leans and steady < STEADY * abs(mean) and (found is None or abs(mean) > abs(found[1])):
                found = int(which), mean, self._steps[begin]
        return found


def _begin(values: Array) -> int:
    """Where the values begin to lean: the tail whose mean is most above its error."""
    count = len(values)
    sums, squares = np.cumsum(values[::-1])[::-1], np.cumsum(values[::-1] ** 2)[::-1]
    left = np.arange(count, 0, -1)
    mean = sums / left
    spread = np.maximum(squares / left - mean**2, 1e-300)
    t = np.abs(mean) * np.sqrt(left / spread)
    return int(np.argmax(t[: max(1, count - LEAST_STEPS + 1)]))


@dataclass
class Repetition:
    """What A and a repetition of it differ by up to the step that is judged: it takes the place of growth."""

    bounds: Bounds
    high: dict[str, Array] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)

    def learn(self, link: str, values: Array) -> None:
        values = np.where(np.isfinite(values), values, 0.0)
        self.high[link] = np.maximum(self.high.get(link, np.zeros_like(values)), values)
        if (median := float(np.median(values))) > 0.0:
            self.start.setdefault(link, median)

    def allowed(self, link: str, by_growth: Array) -> Array:
        """Return ``by_growth`` where the repetition had every bit of A: that says nothing of growth."""
        if link not in self.start:
            return by_growth
        bound = {"loss": self.bounds.loss, "update": self.bounds.update}.get(link, self.bounds.gradient)
        high = np.maximum(self.high[link], np.median(self.high[link]))
        grown = float(np.median(self.high[link])) / self.start[link]
        return np.maximum(FIRST_MARGIN * bound * max(1.0, grown), MARGIN * high)


# -- what the steps that agree have shown ------------------------------------------------------------------------------


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
    """What the steps that agree have shown: how far rounding goes, and what leans.

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
        u = self._bounds.precision
        least = max(0.25 * u if u > HALF else 8.0 * u, self._bounds.tolerance)
        for link, test in self._tests.items():
            if not self.levels[link].saturated and (leaning := test.leaning(least)) is not None:
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
