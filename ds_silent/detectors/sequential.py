"""Is one rank different from the others, step after step? Evidence that adds up, with a stated false-alarm rate.

    test = SequentialTest(ranks=4, cap=20.0)
    test.step(12, values, healthy)         # (N,) one statistic of each rank at step 12
    test.log_evidence()                    # (N,) log of the Shiryaev-Roberts evidence against each rank

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
and this half is calibrated by simulation (benchmarks/detection.py). A single spike cannot alarm: it counts at most N + pool once.

TILTS, POOL and CLIP say against which effects the test is strong; the false-alarm rate does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WITHIN = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Shifts, in standard deviations, that the comparison within a step looks for; a shift between two loses little."""
HISTORY = (1.0, 2.0, 4.0)
POOL = 1024  # residuals remembered, over all ranks
SCALES = 64  # steps whose spread makes the scale
CLIP = 4.0  # deviations beyond which all are equally extreme: a spike in the pool must not outweigh it
RESOLUTION = 1e-6  # relative differences that are rounding, not spread

_SIGNED_WITHIN = np.array([*WITHIN, *(-t for t in WITHIN)])
_SIGNED_HISTORY = np.array([*HISTORY, *(-t for t in HISTORY)])
_SIGNS = np.sign(np.concatenate([_SIGNED_WITHIN, _SIGNED_HISTORY]))
_LOG_WEIGHTS = np.log([0.5 / len(tilts) for tilts in (_SIGNED_WITHIN, _SIGNED_HISTORY) for _ in tilts])[:, None]
_ROWS = len(_LOG_WEIGHTS)


@dataclass(frozen=True)
class Onset:
    """Since when, and in which direction, a rank differs."""

    step: int
    sign: int  # +1: higher than the others


class SequentialTest:
    """The evidence that one statistic of one rank differs from the others'.

    Args:
        ranks: N.
        cap: log evidence above which a component need not grow, so that a fault's end is seen as soon as its start.
    """

    def __init__(self, ranks: int, cap: float):
        self.ranks, self._cap = ranks, cap
        self._evidence = np.full((_ROWS, ranks), -np.inf)  # log M
        self._cusum = np.zeros((_ROWS, ranks))
        self._onset = np.zeros((_ROWS, ranks), dtype=np.int64)
        self._pool: list[Array] = []  # newest last, (N,) residuals, NaN where unknown
        self._pool_steps: list[int] = []
        self._spreads: list[float] = []

    def step(self, step: int, values: Array, healthy: Flags) -> None:
        """Add the evidence of one step.

        Args:
            step: for the onset.
            values: (N,); a rank whose value is not finite is not compared and keeps its evidence.
            healthy: (N,) ranks that the others are compared with; flagged ranks are compared with these.
        """
        known = np.isfinite(values)
        peers = known & healthy
        if peers.sum() < 1 or known.sum() < 2:
            return
        residuals = self._residuals(values, known, peers)
        gain = self._gain(residuals, known, peers)
        fresh = self._cusum <= 0.0
        self._onset = np.where(fresh & known, step, self._onset)
        self._cusum = np.where(known, np.clip(self._cusum + gain, 0.0, self._cap - _LOG_WEIGHTS), self._cusum)
        grown = np.minimum(np.logaddexp(0.0, self._evidence) + gain, self._cap - _LOG_WEIGHTS)
        self._evidence = np.where(known, grown, self._evidence)
        self._learn(step, values, residuals, peers)

    def log_evidence(self) -> Array:
        """(N,) log of the mean Shiryaev-Roberts evidence; its expectation under the null is the number of steps."""
        return np.asarray(np.logaddexp.reduce(self._evidence + _LOG_WEIGHTS, axis=0))

    def log_cusum(self) -> Array:
        """(N,) log of the mean CUSUM evidence, at least 0: what the newest run of steps says."""
        return np.asarray(np.logaddexp.reduce(self._cusum + _LOG_WEIGHTS, axis=0))

    def onset(self, rank: int) -> Onset:
        """Of the strongest component of ``rank``."""
        row = int(np.argmax(self._evidence[:, rank] + _LOG_WEIGHTS[:, 0]))
        return Onset(int(self._onset[row, rank]), int(_SIGNS[row]))

    def forget_evidence(self, ranks: Flags) -> None:
        """Start again for these ranks: the comparison was spoiled, or the fault has ended."""
        self._evidence[:, ranks] = -np.inf
        self._cusum[:, ranks] = 0.0

    def unlearn(self, rank: int, since: int) -> None:
        """Take a flagged rank out of the history, from the step at which its fault began."""
        for row, at in zip(self._pool, self._pool_steps, strict=True):
            if at >= since:
                row[rank] = np.nan

    # -- one step ----------------------------------------------------------------------------------------------------

    def _residuals(self, values: Array, known: Flags, peers: Flags) -> Array:
        """(N,) deviations from the other peers' median, in units of the spread; clipped, NaN where not known."""
        x = values[peers]
        past = float(np.median(self._spreads)) if self._spreads else 0.0
        result = np.full(self.ranks, np.nan)
        centres, spreads = _others(x)
        everyone = float(np.median(x)), float(x.std(ddof=1)) if len(x) > 1 else 0.0
        centre = np.full(self.ranks, everyone[0])
        spread = np.full(self.ranks, everyone[1])
        if len(x) > 1:
            centre[peers], spread[peers] = centres, spreads
        floor = RESOLUTION * max(abs(everyone[0]), RESOLUTION)
        scale = np.maximum(np.maximum(spread, past), floor)
        result[known] = np.clip((values[known] - centre[known]) / scale[known], -CLIP, CLIP)
        return result

    def _gain(self, residuals: Array, known: Flags, peers: Flags) -> Array:
        """(rows, N) log L of this step, 0 where not known."""
        z = np.where(known, residuals, 0.0)
        outsiders = (known & ~peers).astype(float)  # flagged ranks: compared with the peers and themselves
        pool = np.concatenate(self._pool) if self._pool else np.zeros(0)
        pool = pool[np.isfinite(pool)]
        gains = []
        for tilts, remembered in ((_SIGNED_WITHIN, np.zeros(0)), (_SIGNED_HISTORY, pool)):
            tilted = np.exp(tilts[:, None] * z)
            total = tilted[:, peers].sum(axis=1) + np.exp(tilts[:, None] * remembered).sum(axis=1)
            count = peers.sum() + len(remembered) + outsiders
            gains.append(tilts[:, None] * z + np.log(count) - np.log(total[:, None] + outsiders * tilted))
        return np.where(known, np.concatenate(gains), 0.0)

    def _learn(self, step: int, values: Array, residuals: Array, peers: Flags) -> None:
        if peers.sum() < 2:
            return
        self._spreads = [*self._spreads, float(values[peers].std(ddof=1))][-SCALES:]
        length = POOL // self.ranks
        if length:
            self._pool = [*self._pool, np.where(peers, residuals, np.nan)][-length:]
            self._pool_steps = [*self._pool_steps, step][-length:]

    # -- a resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: numbers, None for NaN and for minus infinity."""
        return {
            "evidence": _listed(self._evidence),
            "cusum": self._cusum.tolist(),
            "onset": self._onset.tolist(),
            "pool": [_listed(row) for row in self._pool],
            "pool_steps": self._pool_steps,
            "spreads": self._spreads,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` of the same number of ranks."""
        self._evidence = np.array(
            [[-np.inf if value is None else value for value in row] for row in state["evidence"]], dtype=np.float64
        )
        self._cusum = np.array(state["cusum"], dtype=np.float64)
        self._onset = np.array(state["onset"], dtype=np.int64)
        self._pool = [np.array([np.nan if v is None else v for v in row], dtype=np.float64) for row in state["pool"]]
        self._pool_steps = [int(step) for step in state["pool_steps"]]
        self._spreads = [float(spread) for spread in state["spreads"]]


def _others(x: Array) -> tuple[Array, Array]:
    """(n,) median and standard deviation of the n - 1 *other* values (deviation 0 when there is only one other)."""
    count = len(x)
    if count < 2:
        return x.copy(), np.zeros(count)
    order = np.argsort(x, kind="stable")
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    ordered = x[order]

    def other(index: int) -> Array:
        return np.asarray(ordered[index + (index >= place)])

    rest = count - 1
    medians = (other((rest - 1) // 2) + other(rest // 2)) / 2
    if rest < 2:
        return medians, np.zeros(count)
    centred = x - x.mean()  # or the squares cancel
    squares = (centred**2).sum() - centred**2 - centred**2 / rest
    return medians, np.sqrt(np.maximum(squares, 0.0) / (rest - 1))


def _listed(values: Array) -> Any:
    whole = values.astype(object)
    whole[~np.isfinite(values)] = None
    return whole.tolist()
