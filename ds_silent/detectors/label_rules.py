"""One rank's labels weigh by another rule than the others': it divides by its own count where they share one.

What a label weighs follows one of three rules, and which one shows after a few steps with other numbers of labels:

* own: the rank's labels weigh the same together, however many they are. Each rank takes a mean.
* shared: each weighs the same number divided by the labels of all ranks.
* fixed: each weighs the same number.

A rank follows a rule where the number that should stay has stayed, to rounding, and breaks it where it has changed by
more than bf16 rounds. Ranks of one script follow one rule together, so there is a finding only if somebody breaks each
of the rules, and every rank follows one. No threshold by chance is needed. A rank whose number of labels never changes
follows several rules, and is no evidence against any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.distributed.parts import ranks_of
from ds_silent.measure.evidence import Evidence, LabelWeights
from ds_silent.records import StepRecord

STEPS = 8
SAME = 1e-5  # relative: fp32 rounds what divides by a count
OTHER = 0.02  # relative: bf16 rounds a weight to 2^-8
_RULES = (
    "all of a step weigh {:.4g} together, however many they are (a mean of its own)",
    "each weighs {:.4g} divided by the labels of all ranks",
    "each weighs {:.4g}, however many they are",
)
_REMEDY = (
    "Normalise the loss on every rank alike: look for a count of labels that is summed over the ranks on some of them "
    "only, or for a branch on the rank."
)


class LabelRulesTest(Detector):
    """Follow, by rule and rank, the number that should stay."""

    key = "label_rules"
    stored = ("number", "stayed", "broken")

    def __init__(self) -> None:
        self._open: Finding | None = None
        self._start(0)

    def _start(self, ranks: int) -> None:
        self._number = np.zeros((len(_RULES), ranks))
        self._stayed = np.zeros((len(_RULES), ranks))  # steps in a row with this number
        self._broken = np.full((len(_RULES), ranks), float(STEPS))  # steps since it was another one

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        weights, ranks = evidence.label_weights, record.world_size
        if any(one.kind == "objective-mismatch" for one in evidence.unlike):  # the ranks differ, which is told
            self._open = None
            self._start(ranks)
        elif weights is not None and bool((weights.smallest > 0.0).all()):
            if self._number.shape[1] != ranks:
                self._start(ranks)
            self._follow(weights)
            self._open = self._judged(record, weights)
        return [] if self._open is None else [self._open]

    def _follow(self, weights: LabelWeights) -> None:
        smallest, largest, everybody = weights.smallest, weights.largest, float(weights.labels)
        low = np.stack([weights.totals, smallest * everybody, smallest])
        high = np.stack([weights.totals, largest * everybody, largest])
        with np.errstate(invalid="ignore"):  # of an infinite loss
            off = np.maximum(np.abs(low - self._number), np.abs(high - self._number))
        same = off <= SAME * self._number
        self._stayed = np.where(same, self._stayed + 1, 1.0 * (high <= low * (1.0 + SAME)))
        broken = (off > OTHER * self._number) & (self._number > 0.0)
        self._broken = np.where(broken, 0.0, self._broken + 1)
        self._number = np.where(same, self._number, low)

    def _judged(self, record: StepRecord, weights: LabelWeights) -> Finding | None:
        follows, breaks, ranks = self._stayed >= STEPS, self._broken < STEPS - 1, record.world_size
        if not (breaks.any(axis=1).all() and follows.any(axis=0).all()):
            agreed = follows.all(axis=1).any() and breaks.any()  # numbers of labels changed, and a rule was kept
            return None if agreed else self._open
        rule = int(follows.sum(axis=1).argmax())
        usual, odd = np.flatnonzero(follows[rule]), np.flatnonzero(~follows[rule])
        if len(odd) > len(usual) or not breaks[rule, odd].all():
            return self._open
        groups = {rule: usual.tolist()}
        for rank in odd.tolist():
            groups.setdefault(int(follows[:, rank].argmax()), []).append(rank)
        each = "; ".join(
            f"on {ranks_of(those)} {_RULES[one].format(self._number[one, those[0]])}" for one, those in groups.items()
        )
        first, other = int(odd[0]), int(usual[0])
        times = float(weights.largest[first] / weights.largest[other])
        message = (
            f"The ranks' labels weigh by unlike rules: {each}. In this step one label of rank {first} counts "
            f"{times:.3g} times one of rank {other}."
        )
        named = tuple(odd.tolist()) if len(odd) < len(usual) else tuple(range(ranks))
        key, since = f"objective:rule:{named}", record.step - STEPS + 1
        found = Finding(
            key, "objective-mismatch", "error", named, "loss", None, None, message, _REMEDY, since, effect=times
        )
        return self._open if self._open is not None and self._open.key == key else found
