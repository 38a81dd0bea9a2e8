"""How large an effect is, and whether it is a fault, a note, or what a rank's own data do.

    effect = effect_of(symptoms, "gradient norm", sizes, EffectContext(random=False, own_past=True))     # pure
    effect.severity, effect.size, effect.of_data
    weigher.weigh(rank, flag, healthy, comparable, random)      # the same, from what the run's ranks have sent

Significance says that there is a difference, size whether it matters. Where rows are dealt at random, data make no
lasting difference, and every one above a small size is a warning. Where each rank may have rows of its own, data make
nearly all differences: an easier shard has another loss, another norm and another direction, and a shard that changes
has them from one step to the next. What data do not do is

* change the length of the gradient beyond what it has been, or turn it, and leave the loss as it was;
* raise a rank's loss far above the highest that any rank has had in this run, the untrained model included;
* make its inputs far larger or smaller than those of any rank have been in this run;

from one step to the next: what comes slowly is learnt, or forgotten.

A difference since the beginning is a note, but for a first loss beyond ``HIGH`` where the other ranks are like each
other: environments with rewards of 1, 10 and 100 have losses as unlike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.comparisons import Strongest
from ds_silent.detectors.finding import listed, unlisted
from ds_silent.detectors.likely_causes import Symptoms, causes_in_words, either_in_words, in_words, likely_causes
from ds_silent.detectors.sequential import Array, Flags
from ds_silent.detectors.symptoms import SUDDEN, Recent, beyond, is_gradual
from ds_silent.records import Severity
from ds_silent.text import Words

PLAIN_SHARE = 1 / 3  # of the norm's log ratio: a loss that moved by less has not made it
PLAIN_LOSS = math.log(1.15)  # a loss that moved by less has not turned the gradient
TURNED = 0.5  # of the cosine that is usual: below it the gradient is turned
HIGH = math.log(3.0)  # a loss that no rows have at the beginning, where the others' losses are alike
SURE = 3.0  # standard errors of a loss's ratio
RESCALED = 5.0  # times as large as any inputs have been, or as small: not normalised as before
UNLIKE = 2.0  # times the others' own range, in logarithms
HIGHEST_EVERY = 64  # steps between two looks at the highest losses so far
FIRST = 8  # losses of each rank that are its beginning
_OF_DATA = (
    "this rank's rows: nothing is wrong where they are of another kind by design; else at their labels, their source, "
    "what normalises them, then at code between this rank's loss and the reduction"
)


@dataclass(frozen=True)
class EffectContext:
    """What is known besides the symptoms; None: not known."""

    random: bool  # rows are dealt at random and anew
    own_past: bool = False  # the symptoms are against the rank's own past, too
    above_highest: float | None = None  # the rank's loss over the highest that any other rank has had
    first_loss: float | None = None  # log of its first ones over the others' highest, less UNLIKE times their range
    inputs_beyond: float | None = None  # factor by which its inputs are outside of what any rank's have been
    sudden: bool = True  # the change was found soon after it began
    norm_beyond: float | None = None  # how far its norm is outside of what it has been, against the others' (logarithm)


@dataclass(frozen=True)
class Effect:
    """``size`` is a ratio to what is usual; None where not known."""

    severity: Severity
    size: float | None
    of_data: bool = False  # other rows on this rank would look the same
    slight: bool = False  # smaller than what is a note where rows are dealt at random
    unsure: bool = False  # a note now; as large a change of the gradient alone may be a fault when more steps show it


def effect_of(seen: Symptoms, where: str, sizes: EffectsConfig, context: EffectContext) -> Effect:
    """Return the effect that a rank's symptoms show; ``where``: the statistic that was found to differ."""
    size = _size(seen, where)
    large = _log(seen.loss) >= math.log1p(sizes.loss) or _log(seen.norm) >= math.log1p(sizes.gradient_norm)
    large |= _turned(seen) >= sizes.direction
    if context.random:
        return Effect("warning" if large else "info", size)
    if context.own_past:
        changed = _changed_by_no_data(seen, where, sizes, context.norm_beyond)
        beyond_all = (context.above_highest or 0.0) >= 1.0 + sizes.changed_loss
        rescaled = (context.inputs_beyond or 1.0) >= RESCALED
        fault = context.sudden and (changed or beyond_all or rescaled)
        unsure = not fault and _may_be_no_data(seen, where, sizes)
        return Effect("warning" if fault else "info", size, of_data=not fault, slight=not large, unsure=unsure)
    fault = seen.ranks > 2 and (context.first_loss or 0.0) >= HIGH and _log(seen.loss) >= HIGH
    return Effect("warning" if fault else "info", size, of_data=not fault, slight=not large)


def _changed_by_no_data(seen: Symptoms, where: str, sizes: EffectsConfig, norm_beyond: float | None) -> bool:
    """Return whether the gradient changed and the loss did not. Beside a direction that was found no norm counts."""
    if seen.loss is None:
        return False
    if _is_longer(seen, where, sizes, norm_beyond) and _follows_norm_little(seen):
        return True
    usual, cosine = seen.usual_cosine, seen.cosine
    if usual is None or cosine is None or seen.direction not in ("off", "opposite"):
        return False
    return usual - cosine >= max(sizes.direction, TURNED * usual) and _log(seen.loss) <= PLAIN_LOSS


def _may_be_no_data(seen: Symptoms, where: str, sizes: EffectsConfig) -> bool:
    """Return whether the norm changed by enough and the loss by little; the rest is hard to see in a few steps."""
    longer = seen.loss is not None and _is_longer(seen, where, sizes, None)
    return longer and (is_plain(seen) or _follows_norm_little(seen))


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


@dataclass
class Flag:
    """A rank that is named or noted: what differs since when, and what its numbers say."""

    where: str  # the statistic
    since: int
    sign: int  # +1: above the others
    component: int  # the tilt that found it, and goes on comparing
    score: float
    threshold: float | None = None
    left: float = 0.0  # log evidence; at half of the threshold the fault has ended
    series: int | None = None  # None: one step was enough
    own_past: bool = False  # found against the rank's own past
    spread: bool = False  # its deviations are larger, not shifted
    weighed: int = 0  # the step of what follows
    severity: Severity | None = None  # None: not weighed yet, its size decides
    meaning: str = "other numbers than the others"
    when: str | None = None  # None: since about step ``since``
    ranks: Sequence[int] = ()
    numbers: str = "not known"
    why: str = ""
    look_at: str = "this rank's rows and code"
    effect: float | None = None
    slight: bool = False  # see Effect
    unsure: bool = False


class Weigher:
    """Remember what the ranks of one run sent, the newest steps whole, and weigh those that are flagged."""

    def __init__(self, ranks: int, words: Words, sizes: EffectsConfig):
        self.recent = Recent(ranks)
        self._ranks, self._words, self._sizes = ranks, words, sizes
        self._highest: Array = np.full((3, ranks), -np.inf)  # losses: so far, before the newest look, and before that
        self._looked = 0  # step of the newest look
        self._first: Array = np.zeros((2, ranks))  # sum of each rank's first losses, and how many

    def remember_losses(self, step: int, loss: Array, healthy: Flags) -> None:
        """Follow the highest losses so far, and each rank's first ones."""
        if step % HIGHEST_EVERY == 0:
            self._highest[1:], self._looked = self._highest[:2], step
        known = healthy & np.isfinite(loss)
        early = np.isfinite(loss) & (self._first[1] < FIRST)
        self._first[:, early] += np.array([loss, np.ones(self._ranks)])[:, early]
        self._highest[0, known] = np.maximum(self._highest[0], loss)[known]

    def plain(self, rank: int, since: int) -> bool:
        """Whether a rank's loss is since a step as it was before, against the others'; False where not known."""
        others = [other for other in range(self._ranks) if other != rank]
        return is_plain(self.recent.symptoms(rank, others, since, own_past=True))

    def far(self, rank: int, found: Strongest, healthy: Flags) -> bool:
        """Whether a rank is so far from the others as no other number of rows makes it."""
        seen = self.recent.spread(rank, [int(r) for r in np.flatnonzero(healthy) if r != rank], found.onset.step)
        return found.onset.sign > 0 and (seen.loss is not None or seen.norm is not None)

    def weigh(self, rank: int, flag: Flag, healthy: Flags, comparable: Flags, random: bool) -> None:
        """Complete the flag of a rank by what its numbers say since its fault began.

        ``healthy``, (N,): ranks that it was compared with; ``comparable``: these, and ranks with a note of old.
        """
        others = [other for other in np.flatnonzero(healthy).tolist() if other != rank]
        own_past, since, recent = flag.own_past, flag.since, self.recent
        sudden = flag.weighed - since <= SUDDEN
        if flag.spread:
            seen = recent.spread(rank, others, since)
        else:
            seen = recent.symptoms(rank, others, since, own_past)
            sudden &= not (own_past and is_gradual(*recent.around(rank, others, since, flag.where)))
        context = replace(self._context(rank, others, since, comparable, random, own_past), sudden=sudden)
        effect = effect_of(seen, flag.where, self._sizes, context)
        flag.severity, flag.effect = flag.severity or effect.severity, effect.size
        flag.slight, flag.unsure = effect.slight, effect.unsure
        self._give_reasons(rank, flag, others, seen, since, own_past, effect.of_data)

    def weigh_again(
        self, rank: int, flag: Flag, others: Sequence[int], since: int, comparable: Flags, random: bool
    ) -> None:
        """Make a fault of a note that has become one."""
        seen = self.recent.symptoms(rank, others, since)
        context = self._context(rank, others, since, comparable, random, own_past=False)
        effect = effect_of(seen, flag.where, self._sizes, context)
        flag.slight = effect.slight
        if effect.severity != "info":
            flag.severity, flag.effect = effect.severity, effect.size
            self._give_reasons(rank, flag, others, seen, since, False, False)

    def _give_reasons(
        self, rank: int, flag: Flag, others: Sequence[int], seen: Symptoms, since: int, own_past: bool, of_data: bool
    ) -> None:
        """Say what a rank's numbers mean; of two ranks the other one may be the wrong one as well."""
        causes = likely_causes(seen, self._words)
        flag.ranks, flag.numbers, flag.why, whose = [rank], in_words(seen), causes_in_words(causes), "this rank"
        if len(others) == 1:
            [other] = others
            mirrored = likely_causes(self.recent.symptoms(other, [rank], since, own_past), self._words)
            flag.numbers, flag.why = in_words(seen, f"rank {other}"), either_in_words({rank: causes, other: mirrored})
            flag.ranks, whose, causes = sorted((rank, other)), "each rank", (*causes[:2], *mirrored[:2])
        look_at = _OF_DATA if of_data else "; then ".join(dict.fromkeys(cause.look_at for cause in causes))
        flag.look_at = look_at.replace("this rank", whose)

    def _context(
        self, rank: int, others: Sequence[int], since: int, comparable: Flags, random: bool, own_past: bool
    ) -> EffectContext:
        recent, others = self.recent, [one for one in np.flatnonzero(comparable).tolist() if one != rank] or others
        highest = self._highest[0, list(others)].max(initial=-np.inf)
        norm_beyond = inputs_beyond = None
        if own_past:
            before = 1 if since >= self._looked else 2  # its fault's own losses are none of its past
            highest = max(highest, self._highest[before, rank])
            inputs_beyond, alone = recent.inputs_beyond(rank, since), recent.norm_moved_alone(rank, others, since)
            norm_beyond = beyond(*recent.around(rank, others, since, "gradient norm")) if alone else 0.0
        now = recent.loss(rank, since)
        above = now / highest if now is not None and 0.0 < highest < math.inf else None
        with np.errstate(all="ignore"):
            first = np.log(self._first[0] / self._first[1])
            theirs = first[list(others)]
            unlike = float(first[rank] - theirs.max() - UNLIKE * np.ptp(theirs))
        first_loss = unlike if math.isfinite(unlike) else None
        return EffectContext(random, own_past, above, first_loss, inputs_beyond, norm_beyond=norm_beyond)

    def state_dict(self) -> dict[str, Any]:
        highest = {"highest": listed(self._highest), "looked": self._looked}
        return {**highest, "first": self._first.tolist(), "recent": self.recent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._first = np.array(state["first"], dtype=np.float64)
        self._highest, self._looked = unlisted(state["highest"]), int(state["looked"])
        self.recent.load_state_dict(state["recent"])
