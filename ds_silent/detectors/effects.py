"""How large an effect is, and whether it is a fault, a note, or what a rank's own data do. Pure.

    effect = effect_of(symptoms, "gradient norm", sizes, EffectContext(random=False, own_past=True))
    effect.severity, effect.size, effect.of_data

Significance says that a difference is there, size whether anybody needs to know. Where rows are dealt at random, data
do not make a lasting difference, and every one above a small size is a warning. Where each rank may have rows of its
own, data make nearly all: an easier shard has another loss, another norm and another direction, and a shard that
changes has them from one step to the next. What data do not do is

* change the length of the gradient beyond what it has been, or turn it, and leave the loss as it was;
* raise a rank's loss far above the highest that any rank has had in this run, the untrained model included;

from one step to the next: what comes slowly is learnt, or forgotten.

Of what is so since the beginning only a first loss beyond ``HIGH`` is more than a note, and that only where the other
ranks are like each other: environments with rewards of 1, 10 and 100 have losses as unlike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.likely_causes import Symptoms
from ds_silent.detectors.sequential import Array
from ds_silent.records import Severity

PLAIN_SHARE = 1 / 3  # of the norm's log ratio: a loss that moved by less has not made it
PLAIN_LOSS = math.log(1.15)  # a loss that moved by less has not turned the gradient
TURNED = 0.5  # of the cosine that is usual: below it the gradient is turned
HIGH = math.log(3.0)  # a loss that no rows have at the beginning, where the others' losses are alike
SUDDEN = 64  # steps within which a change that came from one step to the next is found
BEFORE, FEWEST = 32, 3  # steps right before a change that say what was usual; at least so many
ALONE, MOST = 2.0, 7 / 8  # times as far as so many of the others
SURE = 3.0  # standard errors of a loss's ratio
LONGER = 64  # steps before a change against which moves are measured: the more, the less noise
UNLIKE = 2.0  # times the others' own range, in logarithms


@dataclass(frozen=True)
class EffectContext:
    """What is known besides the symptoms.

    Attributes:
        random: rows are dealt at random and anew.
        own_past: the symptoms are against the rank's own past, too.
        above_highest: the rank's loss over the highest that any other rank has had; None where not known.
        first_loss: log of the rank's first losses over the highest of the others', less UNLIKE times the others' range.
        sudden: the change was found soon after it began.
        norm_beyond: how far its norm is outside of what it has been, against the others' (logarithm); None: not known.
    """

    random: bool
    own_past: bool = False
    above_highest: float | None = None
    first_loss: float | None = None
    sudden: bool = True
    norm_beyond: float | None = None


@dataclass(frozen=True)
class Effect:
    """``size`` is a ratio to what is usual; None where not known."""

    severity: Severity
    size: float | None
    of_data: bool = False  # other rows on this rank would look the same
    slight: bool = False  # smaller than what is a note where rows are dealt at random
    unsure: bool = False  # a note now; as large a change of the gradient alone may be a fault when more steps show it


def effect_of(seen: Symptoms, where: str, sizes: EffectsConfig, context: EffectContext) -> Effect:
    """The effect that a rank's symptoms show.

    Args:
        where: the statistic that was found to differ: ``loss``, ``gradient norm`` or ``gradient direction``.
    """
    size = _size(seen, where)
    large = (
        _log(seen.loss) >= math.log1p(sizes.loss)
        or _log(seen.norm) >= math.log1p(sizes.gradient_norm)
        or _turned(seen) >= sizes.direction
    )
    if context.random:
        return Effect("warning" if large else "info", size)
    if context.own_past:
        changed = _changed_by_no_data(seen, where, sizes, context.norm_beyond)
        fault = context.sudden and (changed or _beyond_all(context, sizes))
        unsure = not fault and _may_be_no_data(seen, where, sizes)
        return Effect("warning" if fault else "info", size, of_data=not fault, slight=not large, unsure=unsure)
    compared = seen.ranks > 2 and seen.loss is not None
    high = context.first_loss is not None and context.first_loss >= HIGH and _log(seen.loss) >= HIGH
    fault = compared and high
    return Effect("warning" if fault else "info", size, of_data=not fault)


def _changed_by_no_data(seen: Symptoms, where: str, sizes: EffectsConfig, norm_beyond: float | None) -> bool:
    """The gradient changed, and the loss did not. A norm beside a direction that was found is as it comes."""
    if seen.loss is None:
        return False
    if _is_longer(seen, where, sizes, norm_beyond) and _follows_norm_little(seen):
        return True
    usual, cosine = seen.usual_cosine, seen.cosine
    if usual is None or cosine is None or seen.direction not in ("off", "opposite"):
        return False
    return usual - cosine >= max(sizes.direction, TURNED * usual) and _log(seen.loss) <= PLAIN_LOSS


def _may_be_no_data(seen: Symptoms, where: str, sizes: EffectsConfig) -> bool:
    """The norm changed by enough, and the loss by little: what else it takes is hard to see in a few steps."""
    if seen.loss is None or not _is_longer(seen, where, sizes, None):
        return False
    return is_plain(seen) or _follows_norm_little(seen)


def _is_longer(seen: Symptoms, where: str, sizes: EffectsConfig, norm_beyond: float | None) -> bool:
    """Whether the norm changed by enough, also beyond what it has been where that is known."""
    changed = _log(seen.norm) if norm_beyond is None else min(_log(seen.norm), norm_beyond)
    return where != "gradient direction" and changed >= math.log1p(sizes.changed_norm)


def _follows_norm_little(seen: Symptoms) -> bool:
    """Whether the loss moved by too little to have made the norm's change."""
    return _log(seen.loss) <= PLAIN_SHARE * _log(seen.norm)


def is_plain(seen: Symptoms) -> bool:
    """Whether a rank's loss is as it was before, as far as that is known."""
    return seen.loss is not None and _log(seen.loss) <= max(PLAIN_LOSS, SURE * seen.loss_noise)


def _beyond_all(context: EffectContext, sizes: EffectsConfig) -> bool:
    return context.above_highest is not None and context.above_highest >= 1.0 + sizes.changed_loss


def _size(seen: Symptoms, where: str) -> float | None:
    if where == "gradient direction":
        usual = seen.usual_cosine
        return None if usual is None or seen.cosine is None else seen.cosine / usual
    return seen.loss if where == "loss" else seen.norm


def _turned(seen: Symptoms) -> float:
    usual = seen.peers_cosine if seen.peers_cosine is not None else seen.past_cosine
    return 0.0 if usual is None or seen.cosine is None else abs(usual - seen.cosine)


def _log(ratio: float | None) -> float:
    return abs(math.log(ratio)) if ratio is not None and 0.0 < ratio < math.inf else 0.0


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
    """Whether a rank moved by itself, of (T, N) values that are all known: farther than all ranks did together, and
    ALONE times as far from that as most others.

    While all learn fast, each rank moves as its own rows have it. Moves are those of medians.

    Args:
        common: how far all ranks moved in another statistic.
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
