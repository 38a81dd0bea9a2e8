"""Weigh a flagged rank: how large the effect is, what it comes from, and what its numbers are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.config import EffectsConfig
from ds_silent.detectors.comparisons import Strongest
from ds_silent.detectors.effects import SUDDEN, UNLIKE, EffectContext, effect_of, is_plain
from ds_silent.detectors.likely_causes import Symptoms, causes_in_words, either_in_words, in_words, likely_causes
from ds_silent.detectors.sequential import Array, Flags
from ds_silent.detectors.stored import listed, unlisted
from ds_silent.detectors.symptoms import Recent
from ds_silent.text import Words

HIGHEST_EVERY = 64  # steps between two looks at the highest losses so far
FIRST = 8  # losses of each rank that are its beginning
_OF_DATA = (
    "this rank's rows: nothing is wrong where they are of another kind by design; else at their labels, their source, "
    "then at code between this rank's loss and the reduction"
)


class Weigher:
    """Remember what the ranks of one run sent, and weigh those that are flagged.

    Args:
        ranks: N.
        words: for the likely causes.
        sizes: below which an effect is a note.

    Attributes:
        recent: the newest steps.
    """

    def __init__(self, ranks: int, words: Words, sizes: EffectsConfig):
        self.recent = Recent(ranks)
        self._ranks, self._words, self._sizes = ranks, words, sizes
        self._highest: Array = np.full((2, ranks), -np.inf)  # losses: so far, and up to some steps ago
        self._first: Array = np.zeros((2, ranks))  # sum of each rank's first losses, and how many

    def remember_losses(self, step: int, loss: Array, healthy: Flags) -> None:
        """Follow the highest losses so far, and each rank's first ones."""
        if step % HIGHEST_EVERY == 0:
            self._highest[1] = self._highest[0]
        known = healthy & np.isfinite(loss)
        early = np.isfinite(loss) & (self._first[1] < FIRST)
        self._first[:, early] += np.stack([loss, np.ones(self._ranks)])[:, early]
        self._highest[0, known] = np.maximum(self._highest[0], loss)[known]

    def plain(self, rank: int, since: int) -> bool:
        """Whether a rank's loss is since a step as it was before, against the others'; False where not known."""
        others = [other for other in range(self._ranks) if other != rank]
        return is_plain(self.recent.symptoms(rank, others, since, own_past=True))

    def far(self, rank: int, found: Strongest, healthy: Flags) -> bool:
        """Whether a rank is so far from the others as no other number of rows makes it."""
        seen = self.recent.spread(rank, [int(r) for r in np.flatnonzero(healthy) if r != rank], found.onset.step)
        return found.onset.sign > 0 and (seen.loss is not None or seen.norm is not None)

    def weighed(
        self, rank: int, flag: dict[str, Any], healthy: Flags, comparable: Flags, random: bool
    ) -> dict[str, Any]:
        """Return the flag of a rank, with what its numbers say since its fault began.

        Args:
            healthy: (N,) ranks that it was compared with.
            comparable: (N,) those, and ranks with a note of old.
            random: whether rows are dealt at random.
        """
        others = [other for other in np.flatnonzero(healthy).tolist() if other != rank]
        own_past, since = flag["own_past"], flag["since"]
        spread = flag.get("spread", False)
        seen = (
            self.recent.spread(rank, others, since) if spread else self.recent.symptoms(rank, others, since, own_past)
        )
        sudden = flag["weighed"] - since <= SUDDEN
        if own_past and sudden and not spread:
            sudden = not self.recent.gradual(rank, others, since, flag["where"])
        context = self._context(rank, others, since, comparable, random, own_past, sudden)
        effect = effect_of(seen, flag["where"], self._sizes, context)
        return {
            **flag,
            **self._reasons(rank, others, seen, since, own_past, effect.of_data),
            "severity": flag["severity"] or effect.severity,
            "effect": effect.size,
            "slight": effect.slight,
            "unsure": effect.unsure,
        }

    def weighed_again(
        self, rank: int, where: str, others: Sequence[int], since: int, comparable: Flags, random: bool
    ) -> dict[str, Any]:
        """Return what has changed of a note that has become a fault; else nothing."""
        seen = self.recent.symptoms(rank, others, since)
        effect = effect_of(seen, where, self._sizes, self._context(rank, others, since, comparable, random))
        if effect.severity == "info":
            return {}
        reasons = self._reasons(rank, others, seen, since, False, False)
        return {"severity": effect.severity, "effect": effect.size, **reasons}

    def _reasons(
        self, rank: int, others: Sequence[int], seen: Symptoms, since: int, own_past: bool, of_data: bool
    ) -> dict[str, str]:
        """What a rank's numbers say; of two ranks the other one may be the wrong one as well."""
        causes = likely_causes(seen, self._words)
        numbers, why, two = in_words(seen), causes_in_words(causes), len(others) == 1
        if two:
            [other] = others
            mirrored = likely_causes(self.recent.symptoms(other, [rank], since, own_past), self._words)
            numbers, why = in_words(seen, f"rank {other}"), either_in_words({rank: causes, other: mirrored})
            causes = (*causes[:2], *mirrored[:2])
        look_at = _OF_DATA if of_data else "; then ".join(dict.fromkeys(cause.look_at for cause in causes))
        look_at = look_at.replace("this rank", "each rank") if two else look_at
        ranks: Any = sorted((rank, *others)) if two else [rank]
        return {"ranks": ranks, "numbers": numbers, "why": why, "look_at": look_at}

    def _context(
        self,
        rank: int,
        others: Sequence[int],
        since: int,
        comparable: Flags,
        random: bool,
        own_past: bool = False,
        sudden: bool = True,
    ) -> EffectContext:
        others = [other for other in np.flatnonzero(comparable).tolist() if other != rank] or others
        highest = self._highest[0, list(others)].max(initial=-np.inf)
        if own_past:
            highest = max(highest, self._highest[1, rank])
        now = self.recent.loss(rank, since)
        above = now / highest if now is not None and 0.0 < highest < math.inf else None
        with np.errstate(all="ignore"):
            first = np.log(self._first[0] / self._first[1])
            theirs = first[list(others)]
            unlike = float(first[rank] - theirs.max() - UNLIKE * np.ptp(theirs))
        beyond = self.recent.beyond(rank, others, since, "gradient norm") if own_past else None
        if own_past and not self.recent.norm_moved_alone(rank, others, since):
            beyond = 0.0
        return EffectContext(random, own_past, above, unlike if math.isfinite(unlike) else None, sudden, beyond)

    def state_dict(self) -> dict[str, Any]:
        return {"highest": listed(self._highest), "first": self._first.tolist(), "recent": self.recent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; older states lack some of it."""
        if "highest" in state:
            self._first = np.array(state["first"], dtype=np.float64)
            self._highest = unlisted(state["highest"])
        if "recent" in state:
            self.recent.load_state_dict(state["recent"])
