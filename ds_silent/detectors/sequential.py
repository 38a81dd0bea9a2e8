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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Stored

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

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
_LOG_WEIGHTS = np.log(np.where(_REMEMBERS, 0.25 / len(HISTORY), 0.25 / len(WITHIN)))[:, None]


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
        gain: (S, components, N) log L of the newest step; 0 where nothing was compared.
        taken: (S, components, N) what the slack has taken off it.
    """

    stored = ("evidence", "cusum", "onset", "pool", "pool_steps", "spreads", "spread_steps", "taken")
    unknown = ("pool", "spreads")

    def __init__(self, series: int, ranks: int, cap: float):
        self.series, self.ranks, self._cap = series, ranks, cap - _LOG_WEIGHTS
        shape = (series, len(_TILTS), ranks)
        self.gain, self.taken = np.zeros(shape), np.zeros(shape)
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
        values = np.clip(np.where(known, values, 0.0), -LARGEST, LARGEST)
        residuals, scales, spreads = self._residuals(values, known, peers)
        self.gain = gain = self._gain(residuals, known, peers)
        if slack is not None:
            self.taken = np.abs(_TILTS)[:, None] * (slack / scales)[:, None, :] * known[:, None, :]
            gain -= self.taken
        mask = known[:, None, :]
        self._onset = np.where(mask & (self._cusum <= 0.0), step, self._onset)
        self._cusum = np.minimum(np.maximum(self._cusum + gain, 0.0), self._cap)
        grown = np.minimum(np.logaddexp(0.0, self._evidence) + gain, self._cap)
        self._evidence = np.where(mask, grown, self._evidence)
        self._learn(step, residuals, spreads, peers)

    def log_evidence(self) -> Array:
        """(S, N) log of the mean Shiryaev-Roberts evidence; its expectation under the null is the number of steps."""
        return np.asarray(np.logaddexp.reduce(self._evidence + _LOG_WEIGHTS, axis=1))

    def log_cusum(self) -> Array:
        """(S, N) log of the mean CUSUM evidence, at least 0: what the newest run of steps says."""
        return np.asarray(np.logaddexp.reduce(self._cusum + _LOG_WEIGHTS, axis=1))

    def onset(self, series: int, rank: int) -> Onset:
        """Of the strongest component."""
        best = int(np.argmax(self._evidence[series, :, rank] + _LOG_WEIGHTS[:, 0]))
        return Onset(int(self._onset[series, best, rank]), int(_SIGNS[best]), best)

    def forget_evidence(self, ranks: Flags, since: int = 0) -> None:
        """Start again for these ranks, from a series on: the comparison was spoiled, or the fault ended."""
        self._evidence[since:, :, ranks] = -np.inf
        self._cusum[since:, :, ranks] = 0.0

    def halve_cusum(self, series: int) -> None:
        """Take half of one statistic's (log) CUSUM back."""
        self._cusum[series] /= 2.0

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
            x = values[rows][:, inside]
            middle = np.median(x, axis=1)[:, None]
            whole = x.std(axis=1, ddof=1)[:, None] if x.shape[1] > 1 else np.zeros_like(middle)
            centre, spread = np.repeat(middle, self.ranks, axis=1), np.repeat(whole, self.ranks, axis=1)
            if x.shape[1] > 1:
                centre[:, inside], spread[:, inside] = others(x)
                spreads[rows] = whole[:, 0]
            floor = RESOLUTION * np.maximum(np.abs(middle), RESOLUTION)
            scale = np.maximum(np.maximum(spread, past[rows][:, None]), floor)
            deviation = np.clip((values[rows] - centre) / scale, -CLIP, CLIP)
            residuals[rows], scales[rows] = np.where(any_known, deviation, 0.0), scale
        return residuals, scales, spreads

    def _gain(self, residuals: Array, known: Flags, peers: Flags) -> Array:
        """(S, components, N) log L of this step, 0 where not known."""
        exponents = _TILTS[:, None] * residuals[:, None, :]
        tilted = np.exp(exponents)
        outsiders = (known & ~peers)[:, None, :]  # flagged ranks: compared with the peers and themselves
        total = (tilted * peers[:, None, :]).sum(axis=2) + self._pool_total
        count = peers.sum(axis=1)[:, None] + self._pool_count[:, None] * _REMEMBERS
        with np.errstate(divide="ignore", invalid="ignore"):
            if outsiders.any():
                gain = exponents + np.log(count[:, :, None] + outsiders)
                gain -= np.log(total[:, :, None] + outsiders * tilted)
            else:  # nearly always, and one logarithm for all ranks
                gain = exponents + np.log(count)[:, :, None] - np.log(total)[:, :, None]
        return np.where(known[:, None, :], gain, 0.0)

    def _learn(self, step: int, residuals: Array, spreads: Array, peers: Flags) -> None:
        known = np.isfinite(spreads)
        if known.any():  # one rank alone has no spread, and what was known stays
            at = self._taken % SCALES
            self._spreads[at, known], self._spread_steps[at] = spreads[known], step
        at = self._taken % len(self._pool)
        self._pool[at] = np.where(peers, residuals, np.nan)
        self._pool_steps[at] = step
        self._pool_sums[at], self._pool_counts[at] = _tilted_sums(self._pool[at])
        self._pool_total, self._pool_count = self._pool_sums.sum(axis=0), self._pool_counts.sum(axis=0)
        self._taken += 1

    def _sum_pool(self) -> None:
        self._pool_sums, self._pool_counts = _tilted_sums(self._pool)
        self._pool_total, self._pool_count = self._pool_sums.sum(axis=0), self._pool_counts.sum(axis=0)

    # -- a resume ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of as many ranks; what a version that remembered less has written stays empty."""
        if np.shape(state["evidence"]) != self._evidence.shape:
            return
        pool = np.size(np.array(state["pool"], dtype=np.float64)) == self._pool.size
        super().load_state_dict({name: value for name, value in state.items() if pool or not name.startswith("pool")})
        self._sum_pool()


def strongest_tilt(sign: int) -> int:
    """The component that looks back and asks for the largest shift."""
    return int(np.argmax(np.where(_REMEMBERS & (sign == _SIGNS), np.abs(_TILTS), 0.0)))


def _tilted_sums(pool: Array) -> tuple[Array, Array]:
    """(..., S, N) residuals to (..., S, components) sums of exp(t z), where history counts, and (..., S) counts."""
    known = np.isfinite(pool)
    counts = known.sum(axis=-1).astype(np.float64)
    tilted = np.exp(_TILTS[_REMEMBERS][:, None] * np.where(known, pool, 0.0)[..., None, :]) * known[..., None, :]
    sums = np.zeros((*pool.shape[:-1], len(_TILTS)))
    sums[..., _REMEMBERS] = tilted.sum(axis=-1)
    return sums, counts


def median_of_known(values: Array, otherwise: float = 0.0) -> Array:
    """Return the medians over the last axis of what is not NaN; ``otherwise`` where nothing is known."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    count = np.isfinite(values).sum(axis=-1)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[..., None] // 2, axis=-1)[..., 0]
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    return np.where(count > 0, (low + high) / 2.0, otherwise)


def others(x: Array) -> tuple[Array, Array]:
    """(S, n) median and standard deviation of the n - 1 *other* values of a row (0 when there is only one other)."""
    count = x.shape[1]
    order = np.argsort(x, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    ordered = np.take_along_axis(x, order, axis=1)
    rest = count - 1

    def other(index: int) -> Array:
        return np.take_along_axis(ordered, index + (index >= place), axis=1)

    medians = (other((rest - 1) // 2) + other(rest // 2)) / 2
    if rest < 2:
        return medians, np.zeros_like(x)
    squares = (x - x.mean(axis=1, keepdims=True)) ** 2  # centred first, or they cancel
    left = squares.sum(axis=1, keepdims=True) - squares - squares / rest
    return medians, np.sqrt(np.maximum(left, 0.0) / (rest - 1))
