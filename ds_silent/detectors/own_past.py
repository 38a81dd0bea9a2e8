"""Compare each rank's statistics with its own past: what is left is a change, whatever rows the rank has.

    past = OwnPast(series=4, ranks=8, window=128, smallest=smallest)
    moved = past.moved(values)                     # (S, N) less each rank's own mean; then subtract what explains it
    deviations, slack = past.step(moved, values, healthy)     # (S, N) each; learns the step

**The model.** If each rank has rows of its own, the value of a rank at step n is

    x_rn = c_n + a_rn + s_r e_rn

with a level c common to all ranks, an offset a_r that comes from the rank's rows and moves as the model learns them, a
scale s_r of its own, and noise e that is exchangeable over ranks and time. Only the speed of a_r is assumed. With m_r
the mean of the rank's own last values (weights fall by 1 - 1/W per step, W the window) the difference from its own
past, and from what the others do at the same time,

    y_rn = (x_rn - m_r) - median over the ranks of (x_jn - m_j)

is s_r e_rn plus the offset's move since then. A rank's offset is expected to go on as before or to stand still: both
moves lie in [0, b_r], with b_r the mean of y_r over the same window. Offsets that walk at random move by chance as far
as the ranks' do in this run: ``WALKS`` standard deviations of b_j, beyond the part that noise gives b_j. If all ranks
learn faster than before, offsets may move faster too: by the ratio of the level's move over the window to its usual
move, and no further than the level. A jump of the level from one step to the next, as when the data mixture changes on
all ranks, changes each rank by another amount: so all of it is allowed as long as the window sees it. So the null
hypothesis is

    |y_rn - b_r / 2 - s_r e_rn| <= slack_r = |b_r| / 2 + walk + min(walk (l / l_usual - 1)+, l) + jump + smallest

with l the size of the level's move over the window, l_usual its usual size, jump the largest difference of the newest
steps from those before. The test gets (y_r - b_r / 2) / s_r and slack_r / s_r.
:class:`~ds_silent.detectors.sequential.SequentialTest` takes the slack off every bet. That is exact for shifts within
half of the slack, whatever the other ranks' shifts are; within all of it if the others' have no common sign. m_r
absorbs a lasting shift after W steps: so several windows run side by side, short ones for large shifts.

A value beyond ``CLIP`` scales of its rank is learnt as ``CLIP`` scales, so that one spike does not become the past. The
scale is that which a share ``OUTSIDE`` of the values exceeds. It follows their number, not their size: a change must
not set the scale that measures it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Stored
from ds_silent.detectors.sequential import Array, Flags, clip, median_of_known

CLIP = 4.0  # of a rank's own scale
FEWEST = 8  # values for a rank's mean; a comparison needs twice as many, and an eighth of a long window
SCALE = 64  # fewest values for a rank's scale
OUTSIDE = 0.3173  # of normal values, beyond one standard deviation
NEWEST, NEAR = 4, 16  # steps whose means differ if all ranks move at once
WALKS = 3.0  # standard deviations of offsets that walk at random
WALK_MEMORY = 4  # windows that show how far offsets walk
NOISE_OF_WALK = 1.5  # times the variance that noise alone gives a drift
CHI_SQUARED = 0.455  # median of the square of a normal value
PRIOR = 8.0  # values that the typical scale counts as in each rank's own
RESOLUTION = 1e-6  # relative differences that are rounding
SURE = 3.0  # standard errors; smaller moves of the level do not count


class OwnPast(Stored):
    """Follow each rank's past.

    Args:
        series, ranks: S, N.
        window: W, steps; (S,) where each series has one of its own.
        smallest: (S,) moves of an offset, always allowed.
    """

    stored = (
        *("mean", "drift", "square", "count"),
        *("level", "level_square", "level_moves", "sudden", "levels", "walks", "walk_noise"),
    )

    def __init__(self, series: int, ranks: int, window: int | npt.NDArray[np.int_], smallest: Array):
        self._smallest = np.asarray(smallest, dtype=np.float64)[:, None]
        self._windows = np.full(series, window, dtype=np.float64)
        self._window = self._windows[:, None]
        self._most = np.maximum(self._window, SCALE)  # values that are counted
        shape = (series, ranks)
        self._mean, self._drift, self._square = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._count = np.zeros(shape)
        self._walks, self._walk_noise = np.zeros(series), np.zeros(series)
        self._level = np.zeros((3, series))  # mean move of all ranks, over the window and over newer steps
        self._level_moves, self._sudden = np.zeros(series), np.zeros(series)
        self._level_square = np.zeros(series)
        self._levels = np.zeros(series)

    def means(self) -> Array:
        """Return (S, N) the mean of each rank's past; NaN without one."""
        return np.where(self._count > 0, self._mean, np.nan)

    def moved(self, values: Array) -> Array:
        """Return (S, N) values less the mean of each rank's past; NaN if it is short."""
        return np.where(self._count >= FEWEST, values - self._mean, np.nan)

    def step(self, moved: Array, values: Array, healthy: Flags) -> tuple[Array, Array]:
        """Compare one step, then learn it.

        Args:
            moved: (S, N) of :meth:`moved`, less what other statistics explain.
            values: (S, N) as they are; NaN if unknown.
            healthy: (N,) ranks that are not set apart; the past of the others stands still.

        Returns:
            (S, N) deviations in units of each rank's own scale, NaN if its past is too short or its value unknown;
            (S, N) slack in the same units, at least 0.
        """
        known = np.isfinite(moved)
        peers = known & healthy
        level = median_of_known(np.where(peers, moved, np.nan))
        off = np.where(known, moved - level[:, None], 0.0)
        scale = self._scales(values, peers)
        compared = known & (self._count >= np.maximum(2 * FEWEST, self._window / 8))
        slack = np.abs(self._drift) / 2.0 + self._expected(level)[:, None] + self._smallest
        deviations = np.where(compared, (off - self._drift / 2.0) / scale, np.nan)
        self._learn_noise(off, level, scale, peers)
        self._learn_mean(values, healthy, np.where(peers, CLIP * scale, np.inf))
        return deviations, np.where(compared, slack / scale, 0.0)

    def _scales(self, values: Array, peers: Flags) -> Array:
        """Return (S, N) each rank's scale, near the ranks' typical one while values are few."""
        typical = median_of_known(np.where(peers & (self._count > 0), self._square, np.nan))[:, None]
        count = np.maximum(self._count, 1.0)
        square = (count * self._square + PRIOR * typical) / (count + PRIOR)
        floor = RESOLUTION * np.fmax(np.abs(values), RESOLUTION)
        return np.asarray(np.maximum(np.sqrt(square), floor))

    def _expected(self, level: Array) -> Array:
        """Return (S,) how far offsets may move in health: as before, faster if all move faster, at once if all jump."""
        walk = WALKS * np.sqrt(np.maximum(self._walks - NOISE_OF_WALK * self._walk_noise, 0.0))
        usual = np.maximum(np.sqrt(self._level_moves), RESOLUTION)
        now = self._beyond_noise(self._level[0], self._windows)
        jump = np.maximum(np.abs(level - self._level[2]) - SURE * np.sqrt(self._level_square), self._sudden)
        return np.asarray(walk + clip(walk * (now / usual - 1.0), 0.0, now) + jump)

    def _beyond_noise(self, move: Array, steps: int | Array) -> Array:
        """Return (S,) the size of the level's mean move over ``steps``, less what noise explains."""
        return np.asarray(np.maximum(np.abs(move) - SURE * np.sqrt(self._level_square) / np.sqrt(2.0 * steps), 0.0))

    def _learn_noise(self, off: Array, level: Array, scale: Array, peers: Flags) -> None:
        """Learn each rank's scatter and drift, and how far the common level moves."""
        clipped = clip(off, -CLIP * scale, CLIP * scale)
        rest = np.square(off - self._drift)
        rate = 1.0 / np.maximum(self._count - FEWEST + 1.0, 1.0)
        first = self._square + rate * (rest - self._square)
        beyond = (rest > self._square) - OUTSIDE
        tracked = self._square * np.exp(4.0 * np.maximum(rate, 1.0 / self._most) * beyond)
        known = np.where(self._count < 2 * FEWEST, first, tracked)
        self._square = np.where(peers, known, self._square)
        self._drift = np.where(peers, self._drift + (clipped - self._drift) / self._window, self._drift)
        moving = peers.any(axis=1)
        all_move = bool(moving.all())
        rate_of = _rate(self._levels + 1.0, WALK_MEMORY * self._windows)
        walks = median_of_known(np.where(peers, np.square(self._drift), np.nan)) / CHI_SQUARED
        noise = median_of_known(np.where(peers, self._square, np.nan)) / (2.0 * self._windows - 1.0)

        def followed(mean: Array, value: Array, rate: Array) -> Array:
            new = mean + rate * (value - mean)
            return np.asarray(new if all_move else np.where(moving, new, mean))

        self._walks = followed(self._walks, walks, rate_of)
        self._walk_noise = followed(self._walk_noise, noise, rate_of)
        self._levels = self._levels + moving
        slow = _rate(self._levels, self._windows)
        self._level_square = followed(self._level_square, np.square(level - self._level[1]), slow)
        rates = np.array([slow, _rate(self._levels, NEWEST), _rate(self._levels, NEAR)])
        self._level = followed(self._level, level, rates)
        moved = self._beyond_noise(self._level[1] - self._level[2], NEWEST)
        self._sudden = np.where(moving, np.maximum(self._sudden * (1.0 - 1.0 / self._windows), moved), self._sudden)
        squares = np.square(self._beyond_noise(self._level[0], self._windows))
        self._level_moves = followed(self._level_moves, squares, rate_of)

    def _learn_mean(self, values: Array, healthy: Flags, limit: Array) -> None:
        """Learn each rank's mean, with values clipped to ``limit`` around the others' move."""
        known = np.isfinite(values) & healthy
        moved = np.where(known, values - self._mean, np.nan)
        level = median_of_known(np.where(self._count > 0, moved, np.nan))[:, None]
        step = level + clip(np.where(known, moved, level) - level, -limit, limit)
        step = np.where(self._count > 0, step, np.where(known, values, 0.0))
        rate = np.maximum(1.0 / (self._count + 1.0), 1.0 / self._window)
        self._mean = np.where(known, self._mean + rate * step, self._mean)
        self._count = np.where(known, np.minimum(self._count + 1.0, self._most), self._count)

    def forget(self, ranks: Flags) -> None:
        """Begin anew for these ranks: their next values become their past."""
        for past in (self._mean, self._drift, self._square, self._count):
            past[:, ranks] = 0.0


def _rate(count: Array, window: int | Array) -> Array:
    return np.maximum(1.0 / np.maximum(count, 1.0), 1.0 / window)
