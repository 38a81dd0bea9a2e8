"""Is one rank different from the others, step after step? Evidence that adds up, with a stated false-alarm rate.

    test = SequentialTest(series=3, ranks=4, cap=20.0)
    test.step(12, values, healthy)         # (S, N): S statistics of each rank at step 12
    test.log_evidence()                    # (S, N) log of the Shiryaev-Roberts evidence against each rank

Null hypothesis: given everything before, the ranks' statistics x_1..x_N of a step are *exchangeable*: which rank got
which value is a matter of chance, because the data are dealt at random. Nothing is assumed about their distribution.

Evidence of one step. Let z_j be x_j, centred and scaled by a function that treats all ranks alike, and t a tilt. Then

    L_r = exp(t z_r) / mean over j of exp(t z_j)

has expectation exactly 1 for every rank r: given the set of values, each permutation is equally likely, and the mean
of the numerator over them is the denominator. That holds for every N, t, scale, and every distribution, heavy tails
and NaN-free constants included; 0 <= L_r <= N. If rank r is really shifted by d standard deviations, log L_r grows by
about (1 - 1/N)(t d - t^2/2) per step. Both signs and a grid of tilts are kept, because d is not known.

Evidence of many steps. M_n = (1 + M_{n-1}) L_n (Shiryaev-Roberts) satisfies E M_n = n, M_n - n being a martingale, so
by optional stopping the mean number of steps until M >= A is at least A (an e-detector: Shin, Ramdas and Rinaldo,
arXiv 2203.03532). A weighted mean of such processes, over ranks, tilts and statistics, is again one. So

    "mean of M over everything that is tested >= 10^6 / rate"

raises at most ``rate`` false alarms per million tested steps. No table, no constant.

The same with history (half of the weight). Within a step of 4 ranks no evidence can exceed log 4: even a rank that is
off by 50 deviations needs a dozen steps. So a second family compares z_r with the pool of the last z of all ranks too:

    L_r = exp(t z_r) / mean over j and the pool of exp(t z),     0 <= L_r <= N + pool.

Its expectation is 1 when the scaled residuals are exchangeable over time too (a conformal e-value). The scale is the
larger of the run's past and of the *other* ranks' spread at this very step, so a restless phase of the training is no
evidence. That is an assumption more, so only large tilts are used here, whose evidence a misjudged pool cannot carry,
and this half is calibrated by simulation (benchmarks/detection.py). A single spike cannot alarm: it counts at most
N + pool, once.

Slack. Where rank r may be shifted by up to d_r in health, its bets are on z_r - d_r (of an upward tilt) and z_r + d_r:

    L_r = exp(t z_r - |t| d_r) / mean over j (and the pool) of exp(t z_j),

which has an expectation of at most 1 as long as no healthy shift is larger than half of the slack of whoever it is
compared with: a shift of d/2 of the rank and of -d/2 of all others is what d takes off. In the pool the shifts of all
ranks and times average out.

WITHIN, HISTORY, POOL and CLIP say against which effects the test is strong; the guarantee does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Stored

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = Any  # what picks series
Ranks = Any  # what picks ranks
Add = Callable[..., Array]  # of logarithms along an axis

WITHIN = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Shifts, in standard deviations, that the comparison within a step looks for; a shift between two loses little."""
HISTORY = (1.0, 2.0, 4.0)
POOL = 1024  # residuals remembered, over all ranks; at least those of one step
SCALES = 64  # steps whose spread makes the scale
CLIP = 4.0  # deviations beyond which all are equally extreme: a spike in the pool must not outweigh it
LARGEST = 1e60  # larger values are this large: their squares must stay finite
RESOLUTION = 1e-6  # relative differences that are rounding, not spread

_TILTS = np.array([*WITHIN, *(-t for t in WITHIN), *HISTORY, *(-t for t in HISTORY)])
_SIGNS = np.sign(_TILTS)
_REMEMBERS = np.arange(len(_TILTS)) >= 2 * len(WITHIN)  # components that look at the pool too
_WITHIN = _TILTS[~_REMEMBERS]
_SAME = np.array([int(np.flatnonzero(tilt == _WITHIN)[0]) for tilt in _TILTS])  # where WITHIN has each tilt
_LOG_WEIGHTS = np.log(np.where(_REMEMBERS, 0.25 / len(HISTORY), 0.25 / len(WITHIN)))[:, None]
_TOGETHER = 1 << 18  # numbers whose evidence is made at once: more leave the cache
_FEW, _ROUGHLY = 256, 1e-6  # ranks whose scores are made at once; more than the error of one that is made roughly


@dataclass(frozen=True)
class Onset:
    """Since when, and how, a rank differs."""

    step: int
    sign: int  # +1: higher than the others
    component: int  # the tilt that fits best


class SequentialTest(Stored):
    """The evidence that statistics of one rank differ from the others'.

    Args:
        series: S, statistics that are followed side by side.
        ranks: N.
        cap: log evidence above which a component need not grow.

    Attributes:
        gain: (S, components, N) log L of the newest step, less the slack; 0 where nothing was compared.
    """

    stored = ("evidence", "cusum", "onset", "pool", "pool_steps", "spreads", "spread_steps", "taken")
    unknown = ("pool", "spreads")

    def __init__(self, series: int, ranks: int, cap: float):
        self.series, self.ranks, self._cap = series, ranks, cap - _LOG_WEIGHTS
        shape = (series, len(_TILTS), ranks)
        self.gain = np.zeros(shape)
        self._slack: Array | None = None
        self._evidence = np.full(shape, -np.inf)  # log M
        self._cusum = np.zeros(shape)
        self._onset = np.zeros(shape, dtype=np.int64)
        length = max(1, POOL // ranks)  # steps; beyond POOL ranks the newest step alone is more than POOL
        self._pool = np.full((length, series, ranks), np.nan)  # rings: the entry of a step is its number modulo length
        self._pool_steps = np.full(length, -1, dtype=np.int64)
        self._spreads = np.full((SCALES, series), np.nan)
        self._spread_steps = np.full(SCALES, -1, dtype=np.int64)
        self._taken = 0
        self._sum_pool()

    def step(self, step: int, values: Array, healthy: Flags, slack: Array | None = None) -> None:
        """Add the evidence of one step.

        Args:
            step: for the onset.
            values: (S, N); a rank whose value is not finite is not compared and keeps its evidence.
            healthy: (N,) ranks that the others are compared with; flagged ranks are compared with these.
            slack: (S, N) shifts of a rank that health allows; None: none.
        """
        known = np.isfinite(values)
        known &= ((known & healthy).sum(axis=1) >= 1)[:, None] & (known.sum(axis=1) >= 2)[:, None]
        peers = known & healthy
        values = clip(np.where(known, values, 0.0), -LARGEST, LARGEST)
        residuals, scales, spreads = self._residuals(values, known, peers)
        self._slack = None if slack is None else slack / scales * known
        sums, rows = np.empty((self.series, len(_TILTS))), max(1, _TOGETHER // (len(_TILTS) * self.ranks))
        for part in (slice(begin, begin + rows) for begin in range(0, self.series, rows)):
            sums[part] = self._grow(step, part, residuals[part], known[part], peers[part])
        self._learn(step, residuals, sums, spreads, peers)

    def gained(self, series: int, component: int, rank: int) -> float:
        """Return the log evidence of the newest step as if there were no slack."""
        slack = 0.0 if self._slack is None else np.abs(_TILTS[component]) * self._slack[series, rank]
        return float(self.gain[series, component, rank] + slack)

    def log_evidence(self, rows: Rows = ..., ranks: Ranks = slice(None), add: Add = np.logaddexp.reduce) -> Array:
        """(S, N) log of the mean Shiryaev-Roberts evidence; its expectation under the null is the number of steps."""
        return np.asarray(add(self._evidence[:, :, ranks][rows] + _LOG_WEIGHTS, axis=-2))

    def log_cusum(self, rows: Rows = ..., ranks: Ranks = slice(None), add: Add = np.logaddexp.reduce) -> Array:
        """(S, N) log of the mean CUSUM evidence, at least 0: what the newest run of steps says."""
        return np.asarray(add(self._cusum[:, :, ranks][rows] + _LOG_WEIGHTS, axis=-2))

    def onset(self, series: int, rank: int) -> Onset:
        """Of the strongest component."""
        best = int(np.argmax(self._evidence[series, :, rank] + _LOG_WEIGHTS[:, 0]))
        return Onset(int(self._onset[series, best, rank]), int(_SIGNS[best]), best)

    def forget_evidence(self, ranks: Flags, since: int = 0) -> None:
        """Start again for these ranks, from a series on: the comparison was spoiled, or the fault ended."""
        self._evidence[since:, :, ranks] = -np.inf
        self._cusum[since:, :, ranks] = 0.0

    def halve_cusum(self, rows: Rows) -> None:
        """Take half of some statistics' (log) CUSUM back."""
        self._cusum[rows] /= 2.0

    def unlearn(self, rank: int, since: int) -> None:
        """Take a flagged rank out of the history, from the step at which its fault began, and the spreads it made."""
        self._pool[self._pool_steps >= since, :, rank] = np.nan
        self._spreads[self._spread_steps >= since] = np.nan
        self._sum_pool()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _residuals(self, values: Array, known: Flags, peers: Flags) -> tuple[Array, Array, Array]:
        """(S, N) deviations from the other peers' median in units of the spread, clipped; (S, N) that spread, at least
        the past one; (S,) the peers' spread."""
        past = median_of_known(self._spreads.T)
        residuals, spreads = np.zeros(values.shape), np.full(self.series, np.nan)
        scales = np.ones(values.shape)
        alike = bool((known == known[0]).all())  # nearly always: all statistics know the same ranks
        for rows in [slice(None)] if alike else [slice(s, s + 1) for s in range(self.series)]:
            inside, any_known = peers[rows][0], known[rows][0]
            if not any_known.any():
                continue
            x = np.asfortranarray(values[rows]) if inside.all() else values[rows][:, inside]
            middle = median(x)[:, None]
            centre, spread = middle, np.zeros_like(middle)
            if x.shape[1] > 1:
                centre, spread = others(x)
                whole = x.std(axis=1, ddof=1)
                spreads[rows] = whole
                if not inside.all():
                    centre, spread = _spread_out(centre, middle, inside), _spread_out(spread, whole[:, None], inside)
            floor = RESOLUTION * np.maximum(np.abs(middle), RESOLUTION)
            scale = np.maximum(np.maximum(spread, past[rows][:, None]), floor)
            deviation = clip((values[rows] - centre) / scale, -CLIP, CLIP)
            residuals[rows], scales[rows] = np.where(any_known, deviation, 0.0), scale
        return residuals, scales, spreads

    def _grow(self, step: int, part: slice, residuals: Array, known: Flags, peers: Flags) -> Array:
        """Add the step's evidence of some series; (series, components) sums of exp(t z) over the peers."""
        gain, sums = self._gain(part, residuals, known, peers)
        if self._slack is not None:
            gain -= np.abs(_TILTS)[:, None] * self._slack[part, None, :]
        mask, evidence, cusum = known[:, None, :], self._evidence[part], self._cusum[part]
        np.copyto(self._onset[part], step, where=mask & (cusum <= 0.0))
        cusum += gain
        np.minimum(np.maximum(cusum, 0.0, out=cusum), self._cap, out=cusum)
        every = bool(known.all())
        grown = np.exp(evidence, out=evidence if every else None)
        np.log1p(grown, out=grown)  # of an evidence below the cap, a fifth of the time that logaddexp takes
        grown += gain
        np.minimum(grown, self._cap, out=grown)
        if not every:
            np.copyto(evidence, grown, where=mask)
        return sums

    def _gain(self, part: slice, residuals: Array, known: Flags, peers: Flags) -> tuple[Array, Array]:
        """(series, components, N) log L of this step, 0 where not known; see :meth:`_grow`."""
        tilted = np.exp(_WITHIN[:, None] * residuals[:, None, :])
        sums = (tilted if peers.all() else tilted * peers[:, None, :]).sum(axis=2)[:, _SAME]
        total = sums + self._pool_total[part]
        count = peers.sum(axis=1)[:, None] + self._pool_count[part, None] * _REMEMBERS
        outsiders = (known & ~peers)[:, None, :]  # flagged ranks: compared with the peers and themselves
        gain = np.multiply(_TILTS[:, None], residuals[:, None, :], out=self.gain[part])
        with np.errstate(divide="ignore", invalid="ignore"):
            if outsiders.any():
                gain += np.log(count[:, :, None] + outsiders)
                gain -= np.log(total[:, :, None] + outsiders * tilted[:, _SAME])
            else:  # nearly always, and one logarithm for all ranks
                gain += np.log(count)[:, :, None]
                gain -= np.log(total)[:, :, None]
        if not known.all():
            np.copyto(gain, 0.0, where=~known[:, None, :])
        return gain, np.asarray(sums)

    def _learn(self, step: int, residuals: Array, sums: Array, spreads: Array, peers: Flags) -> None:
        known = np.isfinite(spreads)
        if known.any():  # one rank alone has no spread, and what was known stays
            at = self._taken % SCALES
            self._spreads[at, known], self._spread_steps[at] = spreads[known], step
        at = self._taken % len(self._pool)
        self._pool[at] = np.where(peers, residuals, np.nan)
        self._pool_steps[at] = step
        self._pool_sums[at], self._pool_counts[at] = sums[:, _REMEMBERS], peers.sum(axis=1)
        self._taken += 1
        self._add_up()

    def _sum_pool(self) -> None:
        self._pool_sums, self._pool_counts = _tilted_sums(self._pool)
        self._add_up()

    def _add_up(self) -> None:
        self._pool_total, self._pool_count = np.zeros((self.series, len(_TILTS))), self._pool_counts.sum(axis=0)
        self._pool_total[:, _REMEMBERS] = self._pool_sums.sum(axis=0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of as many ranks."""
        super().load_state_dict(state)
        self._sum_pool()


def strongest_tilt(sign: int) -> int:
    """The component that looks back and asks for the largest shift."""
    return int(np.argmax(np.where(_REMEMBERS & (sign == _SIGNS), np.abs(_TILTS), 0.0)))


def _tilted_sums(pool: Array) -> tuple[Array, Array]:
    """(..., S, N) residuals to (..., S, tilts) sums of exp(t z) of the tilts of history, and (..., S) counts."""
    known = np.isfinite(pool)
    tilted = np.exp(_TILTS[_REMEMBERS][:, None] * np.where(known, pool, 0.0)[..., None, :]) * known[..., None, :]
    return tilted.sum(axis=-1), known.sum(axis=-1).astype(np.float64)


def highest(score: Callable[[Ranks, Add], Array], among: Flags) -> tuple[int, float]:
    """Return the rank with the highest score among some, and its score; rank 0 where all have minus infinity.

    Args:
        score: gives the scores of some ranks, with what adds up logarithms. Those of many ranks are made roughly first,
            and exactly of the ranks that are near the highest.
    """
    ranks = among.nonzero()[0]
    if not len(ranks):
        return 0, -math.inf
    if len(ranks) > _FEW:
        parts = (slice(begin, begin + _FEW) for begin in range(0, len(among), _FEW))
        rough = np.concatenate([score(part, _log_of_sum) for part in parts])[ranks]
        if rough.max() == -np.inf:
            return 0, -math.inf
        ranks = ranks[~(rough < rough.max() - _ROUGHLY)]  # all of them where one is no number
    scores = score(ranks, np.logaddexp.reduce)
    best = int(np.argmax(scores))
    return 0 if scores[best] == -np.inf else int(ranks[best]), float(scores[best])


def _log_of_sum(logs: Array, axis: int) -> Array:
    largest = max(float(logs.max()), -LARGEST)  # or all would be 0
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(logs - largest).sum(axis=axis)) + largest)


def only(rank: int, ranks: int) -> Flags:
    """(N,) true for one rank alone."""
    return np.asarray(np.arange(ranks) == rank)


def clip(values: Array, low: Array | float, high: Array | float) -> Array:
    """Return what ``np.clip`` does, which takes four times as long for a few numbers."""
    return np.asarray(np.minimum(np.maximum(values, low), high))


def median(values: Array) -> Array:
    """Return the ``np.median`` of the last axis, which takes five times as long for a few numbers."""
    ordered, half = np.sort(values, axis=-1), values.shape[-1] // 2
    middle = ordered[..., half] if values.shape[-1] % 2 else (ordered[..., half - 1] + ordered[..., half]) / 2.0
    return np.where(np.isnan(ordered[..., -1]), np.nan, middle)  # NaN comes last


def median_of_known(values: Array, otherwise: float = 0.0) -> Array:
    """Return the medians over the last axis of what is not NaN; ``otherwise`` where nothing is known."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    count = np.isfinite(values).sum(axis=-1)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[-1] - 1)
    flat, at = ordered.reshape(-1, values.shape[-1]), np.arange(count.size).reshape(count.shape)
    return np.where(count > 0, (flat[at, low] + flat[at, high]) / 2.0, otherwise)


def others(x: Array) -> tuple[Array, Array]:
    """(S, n) median and standard deviation of the n - 1 *other* values of a row (0 when there is only one other)."""
    ordered, rest = np.sort(x, axis=1), x.shape[1] - 1

    def other(index: int) -> Array:
        here, next_one = ordered[:, index, None], ordered[:, index + 1, None]
        return np.where(x <= here, next_one, here)

    medians = (other((rest - 1) // 2) + other(rest // 2)) / 2
    if rest < 2:
        return medians, np.zeros_like(x)
    squares = (x - x.mean(axis=1, keepdims=True)) ** 2  # centred first, or they cancel
    left = squares.sum(axis=1, keepdims=True) - squares - squares / rest
    return medians, np.sqrt(np.maximum(left, 0.0) / (rest - 1))


def _spread_out(values: Array, rest: Array, inside: Flags) -> Array:
    """(S, N) with values (S, n) inside, and those of the rest (S, 1) outside."""
    result = np.repeat(rest, len(inside), axis=1)
    result[:, inside] = values
    return result
