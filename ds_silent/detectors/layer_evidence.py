"""Collect evidence that a rank's layers are off, over all layers, statistics, tilts and ranks at a stated rate.

The statistics are taken against the rank's own other layers: that is much calmer than the norms themselves, so that a
factor of 1.5 in one of 28 layers shows within some steps. A function of a rank's own values that is the same for all
ranks keeps exchangeable ranks exchangeable, so the null hypothesis and the evidence of one step are those of
:mod:`ds_silent.detectors.sequential`: with z the residual against the other ranks and t a tilt,

    L_r = exp(t z_r) / mean over the ranks (and, for half of the weight, the past) of exp(t z),        E L_r = 1,

and M = (1 + M) L (Shiryaev-Roberts) has the expectation n after n steps.

The mixture. S = 2 x layers series, C tilts with weights w_c, N ranks: every M_scr by itself has E M = n, so the mean

    M_r = (1 / S) sum over s, c of w_c M_scr,      E M_r = n,      (1 / N) sum over r of M_r reaches A after A steps or
                                                                    more in the mean,

however the layers depend on each other: a mean of expectations asks for no independence. Rank r is flagged when M_r >=
N A, so all layers, statistics, tilts and ranks together raise the false alarms that A allows, and each of S series pays
log S for the company of the others: 4 nats with 28 layers. A fault in several layers adds up.

Label tokens that are dealt unevenly break the null without a fault: as in ``outlier``, the evidence is divided by that
of the rank's label tokens, which can only lower it, and takes half of its logarithm back where all ranks have as many.

There may be 30,000 series x ranks, on the training thread of one rank: so powers of one exponential instead of many,
products instead of sums of logarithms, sums of the past instead of the past.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_silent.detectors.sequential import CLIP, POOL, RESOLUTION, SCALES, Array, Flags, clip, median_of_known

WITHIN, HISTORY = (0.25, 1.0, 4.0), (1.0, 4.0)
"""Tilts. Shifts between two of them lose a quarter of their speed at most."""
FEW = 16  # ranks up to which each is compared with exactly the others
TOGETHER = 1024  # ranks
MOST = 1e100  # evidence that need not grow
OF_NORMAL = 1.4826  # standard deviation of normal values, over their median distance from the median
_SIGNS = np.array([*(1,) * 3, *(-1,) * 3, *(1,) * 2, *(-1,) * 2])
_REMEMBERS = np.array([False] * 6 + [True] * 4)
_MIDDLE = [1, 4]
_WEIGHTS = np.where(_REMEMBERS, 0.25 / len(HISTORY), 0.25 / len(WITHIN))


class LayerEvidence:
    """The evidence against each rank of one run."""

    def __init__(self, ranks: int):
        self.ranks, self.series = ranks, 0  # S + 1, those of the layers and last the label tokens
        self._of_tokens: Array = np.ones((ranks, len(_WEIGHTS)))  # CUSUM, at least 1
        self._spreads: Array | None = None
        self._spread_steps = np.full(SCALES, -1, dtype=np.int64)

    def start(self, series: int) -> None:
        """Begin without evidence; the scales of as many series stay."""
        shape = (len(_WEIGHTS), series, self.ranks)
        self.series = series
        self.evidence, self.gain = np.zeros(shape), np.ones(shape)  # (C, S + 1, N): M, and L of the newest step
        self.of_series = np.zeros(shape[1:])  # weighted mean of M over the tilts
        self._of_tokens = np.ones((self.ranks, len(_WEIGHTS)))
        self._cusum = np.ones((2, *shape[1:]))  # of the middle tilt, up and down: for the onset
        self._since = np.zeros((2, *shape[1:]), dtype=np.int64)
        if self._spreads is None or self._spreads.shape[1] != series:
            self._spreads = np.full((SCALES, series), np.nan)
            self._spread_steps = np.full(SCALES, -1, dtype=np.int64)
        length = max(1, POOL // self.ranks)
        self._past = np.zeros((length, int(_REMEMBERS.sum()), series))  # sums over the ranks of exp(t z)
        self._past_counts = np.zeros((length, series))
        self._past_steps = np.full(length, -1, dtype=np.int64)
        self._taken = 0

    def step(self, step: int, values: Array, healthy: Flags, slack: Array | None = None) -> None:
        """Add the evidence of one step: values and slack as of ``SequentialTest.step``, (S + 1, N) each."""
        known = np.isfinite(values)
        known &= ((known & healthy).sum(axis=1) >= 1)[:, None] & (known.sum(axis=1) >= 2)[:, None]
        residuals, spreads, scales = self._residuals(np.where(known, values, 0.0), known & healthy)
        self._grow(step, residuals, known, known & healthy, None if slack is None else slack / scales)
        self._learn(step, residuals, spreads, known & healthy)

    def score(self) -> Array:
        """(N,) log evidence against each rank, to be compared with the threshold."""
        together = np.log(np.maximum(self.of_series[:-1].mean(axis=0), 1e-300))
        return np.asarray(together - np.log(self._of_tokens @ _WEIGHTS))

    def strongest(self, rank: int) -> tuple[int, int]:
        """Return the series that speaks loudest against a rank, and its tilt."""
        series = int(np.argmax(self.of_series[:-1, rank]))
        return series, self.strongest_tilt(series, rank)

    def strongest_tilt(self, series: int, rank: int) -> int:
        """Return the tilt of a series that speaks loudest against a rank."""
        return int(np.argmax(self.evidence[:, series, rank] * _WEIGHTS))

    def onset(self, series: int, tilt: int, rank: int) -> int:
        """Return the step since which a series speaks against a rank."""
        return int(self._since[int(_SIGNS[tilt] < 0), series, rank])

    def forget(self, ranks: Flags) -> None:
        """Start again for these ranks."""
        self.evidence[:, :, ranks] = 0.0
        self.of_series[:, ranks] = 0.0
        self._cusum[:, :, ranks] = 1.0
        self._of_tokens[ranks] = 1.0

    def unlearn(self, since: int) -> None:
        """Take the steps from one on out of the history."""
        spoiled = self._past_steps >= since
        self._past[spoiled], self._past_counts[spoiled] = 0.0, 0.0
        assert self._spreads is not None
        self._spreads[self._spread_steps >= since] = np.nan

    def halve_tokens(self) -> None:
        """Take half of the label tokens' (log) evidence back."""
        self._of_tokens = np.sqrt(self._of_tokens)

    def scales(self) -> list[float] | None:
        """Return the usual spread of each series; None where nothing is known."""
        return None if self._spreads is None else median_of_known(self._spreads.T).tolist()

    def load_scales(self, scales: list[float] | None) -> None:
        """Continue with :meth:`scales`; None: without any."""
        self._spreads = None
        if scales is not None:
            self._spreads = np.full((SCALES, len(scales)), np.nan)
            self._spread_steps = np.full(SCALES, -1, dtype=np.int64)
            self._spreads[-1] = scales

    # -- one step ------------------------------------------------------------------------------------------------------

    def _residuals(self, values: Array, peers: Flags) -> tuple[Array, Array, Array]:
        """(S, N) deviations from the peers' middle in units of their spread, clipped; (S,) that spread; (S, N) or
        (S, 1) the units."""
        assert self._spreads is not None
        with np.errstate(all="ignore"):
            past = median_of_known(self._spreads.T)[:, None]
            own = np.where(peers, values, np.nan)
            if self.ranks <= FEW:
                middle, spread = _others(own)
                whole = _spread(own)
            else:
                middle = median_of_known(own, np.nan)[:, None]
                whole = median_of_known(np.abs(own - middle), np.nan) * OF_NORMAL
                spread = whole[:, None]
        floor = RESOLUTION * np.maximum(np.abs(middle), RESOLUTION)
        scale = np.maximum(np.fmax(spread, past), floor)
        middle = np.where(np.isnan(middle), 0.0, middle)
        return clip((values - middle) / scale, -CLIP, CLIP), whole, scale

    def _grow(self, step: int, residuals: Array, known: Flags, peers: Flags, slack: Array | None) -> None:
        count = np.repeat(peers.sum(axis=1)[None].astype(float), len(self.gain), axis=0)
        total = np.zeros_like(count)
        for part in self._parts():
            up = np.empty((len(WITHIN), *residuals[:, part].shape))
            np.exp(residuals[:, part] / 4.0, out=up[0])
            np.square(np.square(up[0]), out=up[1])
            np.square(np.square(up[1]), out=up[2])
            down, own = 1.0 / up, peers[:, part]
            sums = (_sum_over(up, own), _sum_over(down, own))
            total += np.concatenate([*sums, sums[0][1:], sums[1][1:]])
            if slack is not None:  # off every bet
                bet = np.exp(-slack[:, part] / 4.0)
                less = np.stack([bet, bet**4, bet**16])
                up *= less
                down *= less
            gain = self.gain[:, :, part]
            gain[:3], gain[3:6], gain[6:8], gain[8:] = up, down, up[1:], down[1:]
        total[_REMEMBERS] += self._past.sum(axis=0)
        count[_REMEMBERS] += self._past_counts.sum(axis=0)
        for part in self._parts():
            self._grow_part(step, part, total, count, known[:, part], peers[:, part])
        of_tokens = np.clip(self._of_tokens * self.gain[:, -1].T, 1.0, MOST)
        self._of_tokens = np.where(known[-1][:, None], of_tokens, self._of_tokens)

    def _parts(self) -> Iterator[slice]:
        """Of the ranks, so many that what is made of them stays in a cache."""
        return (slice(begin, begin + TOGETHER) for begin in range(0, self.ranks, TOGETHER))

    def _grow_part(self, step: int, part: slice, total: Array, count: Array, known: Flags, peers: Flags) -> None:
        gain, evidence = self.gain[:, :, part], self.evidence[:, :, part]
        outsiders = known & ~peers
        if outsiders.any():  # flagged ranks: compared with the peers and themselves
            gain *= (count[:, :, None] + outsiders) / np.maximum(total[:, :, None] + outsiders * gain, 1e-300)
        else:
            gain *= (count / np.maximum(total, 1e-300))[:, :, None]
        every = bool(known.all())
        if not every:
            gain[:, ~known] = np.nan
        cusum, since = self._cusum[:, :, part], self._since[:, :, part]
        np.copyto(since, step, where=cusum <= 1.0)
        cusum *= gain[_MIDDLE] if every else np.where(known, gain[_MIDDLE], 1.0)
        np.minimum(np.maximum(cusum, 1.0, out=cusum), MOST, out=cusum)
        grown = np.add(evidence, 1.0, out=evidence if every else None)
        grown *= gain
        np.minimum(grown, MOST, out=grown)
        if not every:
            np.copyto(evidence, grown, where=known)
        self.of_series[:, part] = np.einsum("c,csr->sr", _WEIGHTS, evidence)

    def _learn(self, step: int, residuals: Array, spreads: Array, peers: Flags) -> None:
        assert self._spreads is not None
        measured = np.isfinite(spreads)
        measured[:-1] &= spreads[:-1] > 0.0  # a layer that no rank trains yet shows no spread that it may have
        if measured.any():  # one rank alone has no spread, and what was known stays
            at = self._taken % SCALES
            self._spreads[at, measured], self._spread_steps[at] = spreads[measured], step
        at = self._taken % len(self._past)
        peers = peers & measured[:, None]
        large = np.where(peers, np.exp(residuals), 0.0)
        small = np.where(peers, np.exp(-residuals), 0.0)
        for place, tilted in enumerate((large, large**4, small, small**4)):
            self._past[at, place] = tilted.sum(axis=1)
        self._past_counts[at], self._past_steps[at] = peers.sum(axis=1), step
        self._taken += 1


def _sum_over(values: Array, own: Flags) -> Array:
    """(C, S) sums of (C, S, N) values over a series' own ranks, (S, N)."""
    return np.asarray(values.sum(axis=2) if own.all() else np.einsum("csr,sr->cs", values, own.astype(float)))


def _others(own: Array) -> tuple[Array, Array]:
    """(S, N) with NaN to the median and the spread of the *other* known values of each row."""
    without = np.repeat(own[:, None, :], own.shape[1], axis=1)
    without[:, np.arange(own.shape[1]), np.arange(own.shape[1])] = np.nan
    return median_of_known(without, np.nan), _spread(without)


def _spread(values: Array) -> Array:
    """Standard deviation over the last axis, of what is known; 0 of a single value."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    mean = np.where(known, values, 0.0).sum(axis=-1) / np.maximum(count, 1)
    squares = np.where(known, np.square(values - mean[..., None]), 0.0).sum(axis=-1)
    return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)))
