"""One rank's numbers against the others', from the newest records: what :mod:`likely_causes` weighs.

recent = Recent(ranks=4)
recent.append(record, extras)                       # once per measured step
recent.symptoms(rank=2, others=[0, 1, 3], since=21)  # medians over the steps since then; of directions also before
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.comparisons import STATISTICS
from ds_silent.detectors.finding import listed
from ds_silent.detectors.likely_causes import SURE, Symptoms
from ds_silent.detectors.sequential import Array
from ds_silent.measure.evidence import Evidence
from ds_silent.records import StepRecord

REMEMBERED, NUMBERS = 256, 16_384  # steps; of more ranks fewer, down to 8
KEPT, KEPT_NUMBERS = 32, 2048  # of them, in a checkpoint: it stays small
FAR, FAR_LEAST = 3.0, math.log(1.5)  # of the others' distance from each other, and at least: less is another spread
STEADY, STEADY_STEPS = 0.1, 3  # of the others' spread over time, a norm that is constant; over so many newest steps
SUDDEN = 64  # steps within which a change that came from one step to the next is found
BEFORE, FEWEST = 32, 3  # steps right before a change that say what was usual; at least so many
ALONE, MOST = 2.0, 7 / 8  # times as far as so many of the others
LONGER = 64  # steps before a change against which moves are measured: the more, the less noise
LATE, SIZES = 8, 64  # steps by which a change may be dated late; sizes of inputs that show what is usual, at least
_NAMES = ("loss", "norm", "cosine", "rows", "label tokens", "micro-batches", "inputs")
_LOSS, _NORM, _COSINE, _ROWS, _TOKENS, _MICRO, _INPUTS = range(len(_NAMES))


class Recent:
    """What each rank sent in the newest measured steps.

    A rank's cosine is kept as the mean of those with each other one, in which no rank's length counts.
    """

    def __init__(self, ranks: int):
        self._ranks, self._pairs = ranks, True
        self._steps: deque[tuple[int, Array]] = deque(maxlen=max(8, min(REMEMBERED, NUMBERS // ranks)))

    def append(self, record: StepRecord, extras: Evidence) -> None:
        """Remember one step."""
        columns = (
            *(record.loss.per_rank, record.grad_norm.per_rank, _mean_cosines(record)),
            *(extras.rows_taken, extras.label_tokens, extras.micro_batches, extras.input_sizes),
        )
        self._pairs = record.cosine_matrix is not None
        nothing = (math.nan,) * self._ranks
        self._steps.append((record.step, np.array([nothing if c is None else c for c in columns], dtype=np.float64)))

    def symptoms(self, rank: int, others: Sequence[int], since: int, own_past: bool = False) -> Symptoms:
        """Return medians over the remembered steps from ``since`` on; over the newest step if none is remembered.

        ``own_past``: ratios are to what they were right before ``since``; None where that is not remembered.
        """
        if not self._steps or not others:
            return Symptoms(ranks=self._ranks)
        peers, newer = list(others), np.stack(self._since(since))
        loss, loss_noise = _ratio(newer[:, _LOSS], rank, peers)
        norm, norm_noise = _ratio(newer[:, _NORM], rank, peers)
        before = np.array([row for step, row in self._steps if step < since]).reshape(-1, len(_NAMES), self._ranks)
        if own_past:
            usual = before[-BEFORE:] if len(before) >= FEWEST else before[:0]
            loss, loss_noise = _changed(loss, loss_noise, *_ratio(usual[:, _LOSS], rank, peers))
            norm, norm_noise = _changed(norm, norm_noise, *_ratio(usual[:, _NORM], rank, peers))
        older = before[:, _COSINE]
        cosine, peers_cosine = self._directions(newer[:, _COSINE], rank, peers)
        past, past_peers = self._directions(older, rank, peers)
        healthy = older if len(peers) == 1 else np.concatenate([older, newer[:, _COSINE]])  # of two, either is struck
        noise = _cosine_noise(healthy, peers)
        counts: dict[str, Any] = {}
        for name, index in (("rows", _ROWS), ("label_tokens", _TOKENS), ("micro_batches", _MICRO)):
            counts[name], counts[f"peers_{name}"] = _count(newer[:, index], rank, peers)
        return Symptoms(
            loss=loss,
            norm=norm,
            cosine=cosine,
            peers_cosine=peers_cosine,
            past_cosine=past,
            past_peers_cosine=past_peers,
            **counts,
            inputs=_new(_ratio(newer[:, _INPUTS], rank, peers)[0], _ratio(before[:, _INPUTS], rank, peers)[0]),
            ranks=self._ranks,
            loss_noise=loss_noise,
            norm_noise=norm_noise,
            cosine_noise=noise / math.sqrt(len(newer)),
            norm_constant=_constant(newer[:, _NORM], rank, peers),
        )

    def spread(self, rank: int, others: Sequence[int], since: int) -> Symptoms:
        """Return the ratio of loss and norm to the others', larger to smaller, at a usual step since then.

        A ratio is None unless it is FAR times as far as the others are from each other: fewer rows make less.
        """
        rows, peers, ratios = np.stack(self._since(since)), list(others), dict[str, Any]()
        for name, column in (("loss", _LOSS), ("norm", _NORM)):
            with np.errstate(all="ignore"):
                logs = np.log(rows[:, column])
                apart = np.abs(logs - np.median(logs[:, peers], axis=1)[:, None])
            far, theirs = _median(apart[:, rank]), _median(apart[:, peers].flatten())
            if far is not None and theirs is not None and far >= max(FAR * theirs, FAR_LEAST):
                ratios[name] = math.exp(far)
        return Symptoms(**ratios, ranks=self._ranks, spread=True)

    def norm_moved_alone(self, rank: int, others: Sequence[int], since: int) -> bool:
        """Whether the norm of a rank moved by itself, and farther than the others' losses did."""
        at, loss = self._over_time(_LOSS, [rank, *others])
        _, norm = self._over_time(_NORM, [rank, *others])
        before, after = (np.isfinite(loss + norm).all(axis=1) & part for part in (at < since, at >= since))
        if not before.any() or not after.any():
            return True
        learnt = np.median(loss[after], axis=0) - np.median(loss[before][-LONGER:], axis=0)
        common = abs(float(np.median(learnt[1:])))
        return moved_alone(norm[before], norm[after], 0, range(1, 1 + len(others)), common)

    def around(self, rank: int, others: Sequence[int], since: int, where: str) -> tuple[Array, Array]:
        """Return a rank's values less the others' median, before ``since`` and from then on, where they are known."""
        at, values = self._over_time(STATISTICS.index(where), [rank, *others])
        apart = values[:, 0] - np.median(values[:, 1:], axis=1)
        known = np.isfinite(apart)
        return apart[known & (at < since)], apart[known & (at >= since)]

    def _over_time(self, index: int, ranks: list[int]) -> tuple[Array, Array]:
        """(T,) steps and (T, len(ranks)) of a statistic: logarithms, but of cosines."""
        values = np.array([row[index, ranks] for _, row in self._steps]).reshape(-1, len(ranks))
        with np.errstate(all="ignore"):
            return np.array([step for step, _ in self._steps]), values if index == _COSINE else np.log(values)

    def _since(self, step: int) -> list[Array]:
        """What is remembered from a step on, (7, N) each; the newest one if nothing is."""
        return [row for at, row in self._steps if at >= step] or [row for _, row in self._steps][-1:]

    def loss(self, rank: int, since: int) -> float | None:
        """The rank's median loss since then."""
        return _median([row[_LOSS, rank] for row in self._since(since)])

    def inputs_beyond(self, rank: int, since: int) -> float | None:
        """By which factor a rank's inputs are larger, or smaller, than any rank's have been before; 1.0: they are not.

        None: fewer than SIZES are remembered.
        """
        sizes = np.array([row[_INPUTS] for step, row in self._steps if step < since - LATE])
        usual = sizes[np.isfinite(sizes) & (sizes > 0.0)]
        now = _median([row[_INPUTS, rank] for step, row in self._steps if step >= since])
        if len(usual) < SIZES or not now:
            return None
        return max(now / float(usual.max()), float(usual.min()) / now, 1.0)

    def _directions(self, cosines: Array, rank: int, others: list[int]) -> tuple[float | None, float | None]:
        """Return medians of (T, N) mean cosines: the rank's own with the others, and theirs with each other."""
        if self._pairs:
            apart = [_apart(row, rank) for row in cosines]
            return _median([own for own, _ in apart]), _median([theirs for _, theirs in apart])
        theirs = _median(cosines[:, others].flatten()) if len(others) > 1 else None  # of two ranks both are one number
        return _median(cosines[:, rank]), theirs

    def state_dict(self) -> list[Any]:
        """JSON-able: None for what is no finite number."""
        kept = max(4, min(KEPT, KEPT_NUMBERS // self._ranks))
        return [[step, listed(row)] for step, row in list(self._steps)[-kept:]]

    def load_state_dict(self, state: list[Any]) -> None:
        """Continue from :meth:`state_dict` of as many ranks."""
        self._steps.clear()
        rows = [(int(step), np.array(row, dtype=np.float64)) for step, row in state]
        unknown = np.full((len(_NAMES), self._ranks), math.nan)  # an older state has no inputs
        self._steps.extend((step, np.concatenate([row, unknown[len(row) :]])) for step, row in rows)


def _mean_cosines(record: StepRecord) -> Sequence[float] | None:
    """(N,) mean of each rank's cosines with the others that have a direction; with their sum, without pairs."""
    if record.cosine_matrix is None:
        return record.direction.per_rank
    matrix = np.array(record.cosine_matrix, dtype=np.float64)
    known = np.isfinite(matrix.diagonal())
    if known.sum() < 2:
        return None
    matrix = np.where(np.outer(known, known), matrix, 0.0)
    means = (matrix.sum(axis=1) - matrix.diagonal()) / (known.sum() - 1)
    return [float(v) for v in np.where(known, means, math.nan)]


def _apart(means: Array, rank: int) -> tuple[float, float]:
    """(the rank's own mean cosine, that of the others with each other) from all ranks' mean cosines.

    Over the n(n-1) ordered pairs the cosines add up to (n-1) sum of means; those with the rank to 2 (n-1) means[rank].
    """
    known = means[np.isfinite(means)]
    count, own = len(known), float(means[rank])
    if count < 3 or not math.isfinite(own):
        return own, math.nan
    return own, float((known.sum() - 2.0 * own) / (count - 2))


def _cosine_noise(cosines: Array, others: list[int]) -> float:
    """Of (T, N) mean cosines, how far one of the others lies from the rest in one step; 0.0 where it is not known.

    Of two ranks, whose cosine is one number: how far it lies from that of other steps. The others' cosines hold the
    error of the sketch (about 1/sqrt(its size) of one pair) as much as that of their rows, so their spread holds both.
    A spread of few values is itself uncertain: it is so much larger as SURE deviations of Student's distribution are.

    With s the deviation of one pair's cosine and N ranks, a rank's mean less that of the pairs without it has the
    variance s^2 N / ((N-1)(N-2)), and the spread of means that share a pair is s^2 (N-2) / (N-1)^2: their ratio is
    N (N-1) / (N-2)^2.
    """
    compared = cosines[:, others] if len(others) > 1 else cosines[:, others].T
    known = [row for row in (values[np.isfinite(values)] for values in compared) if len(row) > 1]
    if not known:
        return 0.0
    free = float(np.median([len(row) for row in known])) - 1.0
    spread: float = float(np.median([row.std(ddof=1) for row in known])) / (1.0 - 2.0 / (9.0 * free)) ** 1.5  # of chi
    if len(others) > 1:
        spread *= math.sqrt((len(others) + 1) * len(others)) / (len(others) - 1)
    free *= len(known)
    return spread * (math.sqrt(free * math.expm1(SURE**2 / free)) / SURE)  # Wallace (1959)


def _constant(norms: Array, rank: int, others: list[int]) -> bool:
    """Return whether a rank's norm is constant over the newest of (T, N) steps and the others' are not."""
    with np.errstate(all="ignore"):
        logs = np.log(norms[np.isfinite(norms[:, [rank, *others]]).all(axis=1)][-STEADY_STEPS:])
        spread = logs.std(axis=0) if len(logs) == STEADY_STEPS else np.full(norms.shape[1], math.nan)
    usual = float(np.median(spread[others]))
    return 0.0 < usual < math.inf and bool(spread[rank] <= STEADY * usual)


def _ratio(values: Array, rank: int, others: list[int]) -> tuple[float | None, float]:
    """Return the rank over the others' median, and how far a healthy rank's log ratio is from 0 in as many steps."""
    ratios, spreads = [], []
    for row in values:
        own, theirs = row[rank], row[others]
        theirs = theirs[np.isfinite(theirs) & (theirs > 0.0)]
        if not len(theirs) or not (math.isfinite(own) and own > 0.0):
            continue
        ratios.append(float(own / np.median(theirs)))
        if len(theirs) > 1:
            spreads.append(float(np.log(theirs).std(ddof=1)))
    noise = float(np.median(spreads)) / math.sqrt(len(ratios)) if spreads else 0.0
    return _median(ratios), noise


def _changed(
    ratio: float | None, noise: float, before: float | None, noise_before: float
) -> tuple[float | None, float]:
    """Return a ratio over what it was, and its noise."""
    if ratio is None or not before:
        return None, noise
    return ratio / before, math.hypot(noise, noise_before)


def _count(values: Array, rank: int, others: list[int]) -> tuple[float | None, float | None]:
    known = values[np.isfinite(values).all(axis=1) & (values >= 0.0).all(axis=1) & (values.max(axis=1) > 0.0)]
    if not len(known):
        return None, None
    return float(np.median(known[:, rank])), float(np.median(known[:, others]))


def _new(ratio: float | None, before: float | None) -> float | None:
    """Return a ratio that was another before the fault, or was not known."""
    was_so = ratio is not None and before is not None and abs(math.log(ratio / before)) < FAR_LEAST
    return None if was_so else ratio


def _median(values: Sequence[float] | Array) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.median(finite)) if finite else None


# -- over time ---------------------------------------------------------------------------------------------------------


def is_gradual(before: Array, after: Array) -> bool:
    """Whether values, (T,) each, came to what they are step by step, and not from one step to the next.

    From BEFORE steps before the change on, a line that bends somewhere leaves smaller squares than a jump somewhere.
    """
    values = np.concatenate([before[-BEFORE:], after])
    if len(values) < 2 * FEWEST:
        return False
    steps, bends = np.arange(len(values)), np.arange(len(values) - 1)
    jump = np.heaviside(steps - bends[:, None] - 0.5, 0.0)
    return _left(values, np.maximum(steps - bends[:, None], 0.0)) < _left(values, jump)


def beyond(before: Array, after: Array) -> float | None:
    """How far the median of values, (T,) each, lies outside of what they have been.

    What they have been: their medians over as many steps in a row, BEFORE at most; None where fewer are known.
    """
    if len(before) < BEFORE or not len(after):
        return None
    usual = np.median(np.lib.stride_tricks.sliding_window_view(before, min(len(after), BEFORE)), axis=1)
    now = np.median(after)
    return float(max(now - usual.max(), usual.min() - now, 0.0))


def moved_alone(before: Array, after: Array, rank: int, others: Sequence[int], common: float = 0.0) -> bool:
    """Whether a rank moved by itself, of (T, N) values that are all known: farther than all ranks did together (or, if
    ``common``, in another statistic), and ALONE times as far from that as most others.

    While all learn fast, each rank moves as its own rows have it. Moves are those of medians.
    """
    if not len(before) or not len(after):
        return True
    moves = np.median(after, axis=0) - np.median(before[-LONGER:], axis=0)
    theirs = moves[list(others)]
    middle = float(np.median(theirs))
    usual = np.quantile(np.abs(theirs - middle), MOST, method="higher")
    return bool(abs(moves[rank] - middle) >= max(ALONE * usual, abs(middle), common))


def _left(values: Array, shapes: Array) -> float:
    """The least sum of squares that (K, T) shapes, each with a mean and a size of its own, leave of (T,) values."""
    centred, shapes = values - values.mean(), shapes - shapes.mean(axis=1, keepdims=True)
    explained = np.square(shapes @ centred) / np.square(shapes).sum(axis=1)
    return float(np.square(centred).sum() - explained.max())
