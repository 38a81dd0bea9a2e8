"""Ranks that take other numbers of rows or label tokens, step after step.

A mean over a rank's own rows makes a row count less where there are more of them: with 8 rows on one rank and 4 on the
others, that rank's rows have half the say. Batches that are filled by tokens differ on every rank at every step, and
the last batch of an epoch differs once. A fault is that for ``STEPS`` measured steps in a row all ranks but a minority
take one number and the minority another one, the same at each step. A rank that takes all its rows between two measured
steps has a small shard of its own, whose last batch is short in each pass: that is no fault. Nor is it where each label
is seen to weigh the same in every rank's loss.

Label tokens differ on every rank at every step in health. A rank that has less than half, or more than twice, of the
others' median at each of ``TOKEN_STEPS`` measured steps in a row is a note: where rows are dealt at random, chance does
that to one of two ranks once in 2^20 steps at most, and with a shard of its own it may be meant. But a mean over a
rank's own tokens makes each of them count more where there are fewer.

A rank that has one and the same number of label tokens at ``FULL_STEPS`` measured steps in a row, while every other
rank has fewer at each of them, and not always as many, trains what the others leave out: a mask that is missing. Of
rows dealt at random chance makes one of two ranks the fuller one 32 times in a row once in 2^31 steps, so that is a
warning. With a shard of its own the rank may hold rows without anything to leave out: a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.sequential import others
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Severity, StepRecord
from ds_silent.text import TORCH, Words, named

STEPS = 4
_ROOM = 1.5  # the number of different rows is an estimate
TOKEN_STEPS, TOKEN_RATIO = 20, 2.0
FULL_STEPS = 32


class BatchSizeTest(Detector):
    """Count the steps in which the ranks took the same different numbers of rows."""

    key = "batch_size"
    stored = ("rows", "steps", "since")

    def __init__(self, words: Words = TORCH) -> None:
        self._words = words
        self._rows: tuple[int, ...] = ()
        self._steps = 0
        self._since = 0

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return at most one finding: of the ranks outside the majority, or of all where there is none."""
        rows = extras.rows_taken or ()
        if len(set(rows)) != 2 or min(rows) <= 0:
            self._rows, self._steps = (), 0
            return []
        if rows != self._rows:
            self._rows, self._steps, self._since = rows, 0, record.step
        self._steps += 1
        if self._steps < STEPS:
            return []
        (usual, count), (other, _) = Counter(rows).most_common()
        odd = tuple(rank for rank, taken in enumerate(rows) if taken == other)
        if all(_whole_shard(rank, extras) for rank, taken in enumerate(rows) if taken == min(rows)):
            return []
        majority = 2 * count > len(rows)
        ranks = odd if majority else tuple(range(len(rows)))
        rest = "the others" if majority else named(tuple(rank for rank, taken in enumerate(rows) if taken != other))
        take, since = f"{named(odd).capitalize()} {'takes' if len(odd) == 1 else 'take'}", f"since step {self._since}"
        of = dict(zip(rows, extras.micro_batches or (), strict=False))
        if len(set(of.values())) == 2 and len({taken / most for taken, most in of.items() if most}) == 1:
            message = (
                f"{take} {of[other]} micro-batches per measured step, {rest} {of[usual]}, {since}: {other} rows and "
                f"not {usual}."
            )
            remedy = (
                "Look for micro-batches that are left out on some ranks: by the number of accumulation steps, by a "
                "loader that ends early, or by a condition or an exception in the loop."
            )
        elif _count_alike(extras):
            return []  # the script weighs each rank's loss by its rows
        else:
            message = (
                f"{take} {other} rows per measured step, {rest} {usual}, {since}: their rows do not count alike in the "
                "mean."
            )
            remedy = (
                "Give every rank's loader the same batch size, or weigh each rank's loss by its rows; look at "
                f"{self._words.batch_size} and at the loader of the rank named."
            )
        key, score = f"batch-size:{','.join(map(str, rows))}", float(max(rows)) / min(rows)
        return [Finding(key, "batch-size-mismatch", "warning", ranks, "rows", score, 1.0, message, remedy, self._since)]


def _whole_shard(rank: int, extras: Evidence) -> bool:
    """Return whether a rank with rows of its own takes all of them between two measured steps."""
    if extras.dealt == "random" or extras.passes is None or extras.own_rows is None:
        return False
    return extras.passes.distinct[rank] <= _ROOM * extras.own_rows[rank]


def _count_alike(extras: Evidence) -> bool:
    """Return whether every label weighs the same in the ranks' losses, as can be read of them."""
    weights = extras.label_weights
    return weights is not None and bool(weights.largest.max() <= 1.001 * weights.smallest.min())


class LabelTokensTest(Detector):
    """Count the steps in a row in which a rank's label tokens were a fraction, or a multiple, of the others'."""

    key = "label_tokens"

    def __init__(self) -> None:
        self._steps: dict[int, list[float]] = {}  # by rank: steps so far, the first of them, the sum of the logarithms

    def step(self, record: StepRecord, extras: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        """Return at most one finding, of severity ``info``."""
        tokens = np.array(extras.label_tokens or (), dtype=np.float64)
        if len(tokens) < 2 or tokens.min() <= 0 or _count_alike(extras):
            self._steps = {}
            return []
        ratios = np.log(tokens / others(tokens[None])[0][0])
        earlier, self._steps = self._steps, {}
        for rank in np.flatnonzero(np.abs(ratios) > np.log(TOKEN_RATIO)).tolist():
            steps, since, total = earlier.get(rank, [0.0, float(record.step), 0.0])
            if steps and (total < 0) != (ratios[rank] < 0):
                steps, since, total = 0.0, float(record.step), 0.0
            self._steps[rank] = [steps + 1.0, since, total + float(ratios[rank])]
        long = [rank for rank, (steps, *_) in sorted(self._steps.items()) if steps >= TOKEN_STEPS]
        fewer = [rank for rank in long if self._steps[rank][2] < 0]  # of two ranks one has fewer, the other more
        return [self._finding(tuple(fewer or long))] if long else []

    def _finding(self, ranks: tuple[int, ...]) -> Finding:
        steps, since, total = self._steps[ranks[0]]
        factor = float(np.exp(total / steps))
        message = (
            f"{named(ranks).capitalize()} {'has' if len(ranks) == 1 else 'have'} had {factor:.2g} times the label "
            f"tokens of the other ranks' median at every measured step since step {since:g}: where each rank averages "
            f"its loss over its own tokens, each of them counts {1.0 / factor:.2g} times as much as one of the others'."
        )
        remedy = (
            "If each rank has texts of its own, do nothing, or divide the summed loss of all by all tokens. "
            "If rows are dealt at random, look at the labels there: masks, truncation, the index that is ignored."
        )
        key, score = f"label-tokens:{','.join(map(str, ranks))}", max(factor, 1.0 / factor)
        where, begin = "label tokens", int(since)
        return Finding(key, "batch-size-mismatch", "info", ranks, where, score, TOKEN_RATIO, message, remedy, begin)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": [[rank, *held] for rank, held in self._steps.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = {int(rank): [float(value) for value in held] for rank, *held in state["steps"]}


class FullLabelsTest(Detector):
    """Count the steps in a row in which one rank had the same label tokens, and each other rank fewer."""

    key = "full_labels"
    stored = ("full", "rank", "steps", "since", "fewer", "changed")

    def __init__(self) -> None:
        self._full = self._rank = self._steps = self._since = 0  # its label tokens, who it is, since when
        self._fewer = np.zeros(0)  # those of all ranks, at the step before
        self._changed = np.zeros(0)  # by rank: whether they have been other ones

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        tokens = np.array(evidence.label_tokens or (), dtype=np.float64)
        rows = set(evidence.rows_taken or ())
        if len(tokens) < 2 or tokens.min() <= 0 or len(rows) > 1 or (tokens == tokens.max()).sum() > 1:
            self._steps = 0
            return []
        rank = int(tokens.argmax())
        if not self._steps or (rank, int(tokens[rank])) != (self._rank, self._full) or len(tokens) != len(self._fewer):
            self._rank, self._full, self._steps, self._since = rank, int(tokens[rank]), 0, record.step
            self._fewer, self._changed = tokens, np.zeros(len(tokens))
        self._steps += 1
        self._changed = np.maximum(self._changed, tokens != self._fewer)
        self._fewer = tokens
        others_change = int(self._changed.sum()) == len(tokens) - 1
        return [self._finding(evidence)] if self._steps >= FULL_STEPS and others_change else []

    def _finding(self, evidence: Evidence) -> Finding:
        rank = self._rank
        message = (
            f"Rank {rank} has had {self._full} label tokens at every measured step since step {self._since}, and every "
            "other rank fewer at each of them, and not always as many: it leaves nothing out of its labels where the "
            "others do."
        )
        remedy = "Look at the labels on this rank: the mask or the index that is ignored."
        if evidence.dealt != "random":
            remedy = f"If the rows of this rank have nothing to leave out, do nothing. {remedy}"
        severity: Severity = "warning" if evidence.dealt == "random" else "info"
        key, place = f"full-labels:{rank}", (rank,)
        return Finding(key, "batch-size-mismatch", severity, place, "labels", None, None, message, remedy, self._since)
