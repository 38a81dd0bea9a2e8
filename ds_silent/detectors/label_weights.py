"""The sum of what the labels of a step weigh: 1 where the gradient is that of their mean.

What all ranks do wrong alike no comparison of ranks shows. The sum is exact, so that its value says what was done: 4 is
the losses of 4 micro-batches added up and not divided, 1/4 is divided by 4 twice, and likewise for the ranks, over
which the reduction takes the mean.

Only a mean is judged, with nothing beside it in the loss, and only if all other numbers between loss and root are the
script's own divisors: a factor may be a hyper-parameter. Where the framework promises the mean (the wrapper that a loss
is handed to, a Trainer, the ``num_items_in_batch`` that a Trainer gives to a model), another simple product is a fault
at its first step. Two promises say more. A sum over labels that ``num_items_in_batch`` divides must add up to 1, and
each label must count alike. With ``scale_wrt_gas=False`` nobody but the script divides.

A Trainer promises the mean of any loss, also of one with several terms. There it is enough that one mean enters the
root whole, and that nothing on the way to any term may be a division.

A loop that a script writes itself promises nothing: there it is a note, once, when it has been so at ``STEPS`` measured
steps in a row, and the script does not divide the reduced gradients instead; or at once, where step 1 alone has fewer
micro-batches than it divides by. The last window of an epoch may have fewer
micro-batches than a framework divides by: it is not judged. A Trainer divides by as many as come: a window divided by
the configured number is a fault.

A term beside labels that ``num_items_in_batch`` divides, such as a router's auxiliary loss, counts once per micro-batch
and rank where nothing divides it. That is a note, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_silent.capture.loss_graph import MEAN, SUM
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.label_weight_texts import (
    FIRST_LABELS,
    OF_TRANSFORMERS,
    ONLY_BY_ITEMS,
    divided_again,
    micro_batches_of,
    remedy_of,
    sentence_of,
)
from ds_silent.framework import Promise
from ds_silent.measure.evidence import Evidence, LabelWeights
from ds_silent.records import Event, EventKind, StepRecord

STEPS, LONG = 3, 8  # in a row
_SEVERAL_LOSSES = "Several losses of one batch, each with a backward of its own, add up so, too. "
NEAR = 0.02  # relative: bf16 rounds the gradient of a loss to 2^-8
EXACT = 1e-3  # where a number that nobody has named might be near by chance
KIND: EventKind = "objective-mismatch"


class Multiple(NamedTuple):
    """The sum as a product: micro-batches to a power of 1, 0 or -1, times ranks to such a power."""

    micro_batches: int
    ranks: int


class LabelWeightsTest(Detector):
    """Judge the sum of the weights, and where it is promised their spread."""

    key = "objective"
    stored = ("noted", "value", "steps", "beside", "noted_beside", "short")

    def __init__(self) -> None:
        self._noted = self._noted_beside = False
        self._beside = 0  # steps in a row at which other terms count more often than the labels' mean
        self._value, self._steps = 0.0, 0  # of the steps that may become a note
        self._short = 0  # steps in a row with fewer micro-batches than a wrapper divides by
        self._first: tuple[float, int] | None = None  # of step 1: the sum, and how many micro-batches
        self._open: Finding | None = None

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes = ()
        self._note_beside(record, evidence.beside)
        weights = evidence.label_weights
        if any(one.kind == KIND for one in evidence.unlike):  # the ranks differ, which is told
            self._open, self._steps = None, 0
        elif weights is None:
            self._open, self._steps = _added_up(record, evidence), 0
        elif not _is_short(weights):  # else what was found before stays
            self._open, self._short = self._judged(record, weights, evidence), 0
        else:
            self._short += 1
            self._open = _always_short(record, weights) if self._short >= LONG else self._open
        return [] if self._open is None else [self._open]

    def _judged(self, record: StepRecord, weights: LabelWeights, evidence: Evidence) -> Finding | None:
        total, count, ranks = abs(float(weights.totals.mean())), max(weights.backwards), record.world_size
        multiple = multiple_of(total, count, ranks)
        self._note_first(record, total, count)
        if _is_short_of_its_divisor(weights, total, count):
            message = (
                f"The step's gradient is {total:.4g} times that of the mean of its losses, on all ranks alike: this "
                f"window has {count} micro-batches, and each is divided by the configured {weights.accumulation}. "
                f"{_promised(weights, count)}"
            )
            return _finding("sum", message, remedy_of(total), total, record.step)
        if multiple is not None and _is_broken(multiple, weights, ranks):
            message = f"{sentence_of(total, multiple, count, ranks)} {_promised(weights, count)}"
            of_a_trainer = _of_the_mean(weights) in (None, weights.trainer)
            more = multiple.micro_batches > 0 or (weights.by_items and multiple.ranks > 0)
            own = f"{OF_TRANSFORMERS} Else: " if of_a_trainer and more and _is_mean(weights) else ""
            return _finding("sum", message, f"{own}{remedy_of(total)}", total, record.step)
        if number := _divides_again(weights, total, ranks):
            message = f"{divided_again(total, number)} {_promised(weights, count)}"
            return _finding("sum", message, f"{ONLY_BY_ITEMS}{remedy_of(total)}", total, record.step)
        changed = _changed(weights)
        if weights.promise is not None and not _near(changed, 1.0):
            given = f"{weights.promise.by} promises to multiply them by nothing."
            message = (
                f"The step's gradient is {changed:.4g} times that of the losses as the script has given them, on all "
                f"ranks alike. {given if weights.promise.as_given else _promised(weights, count)}"
            )
            return _finding("sum", message, remedy_of(changed), abs(changed), record.step)
        if total > 0.0 and not _near(total, 1.0) and _is_by_items(weights, ranks):
            message = (
                f"The labels of a step weigh {total:.4g} together, although the loss was given num_items_in_batch, the "
                f"number of labels of the whole step, to divide by: it is divided as for {weights.labels / total:.0f} "
                f"labels, and {weights.labels} of them are trained."
            )
            remedy = f"Count the labels that the loss counts, and no others. {remedy_of(total)}"
            if off := _off_by_a_label_each(weights, total, evidence):
                message += FIRST_LABELS[off]
                remedy = f"Do nothing: the gradient is {total:.4g} times as long as that of the labels' mean."
                return replace(_finding("items", message, remedy, total, record.step), severity="info")
            return _finding("items", message, remedy, total, record.step)
        if total > 0.0 and _near(total, 1.0) and weights.by_items and weights.reductions == {SUM}:
            spread = float(weights.largest.max() / weights.smallest.min())
            if not (spread <= 1.0 + NEAR or _each_its_own(weights)):
                message = (
                    f"The labels of a step do not count alike: one counts {spread:.3g} times another, although the "
                    "loss was given num_items_in_batch, the number of labels of the whole step."
                )
                remedy = "Divide the sum over the labels by num_items_in_batch, and by no count of a micro-batch's own."
                return _finding("spread", message, remedy, spread, record.step)
        handed_on = None if evidence.reduction is None else evidence.reduction.handed_on
        made_good = handed_on is not None and handed_on.makes_mean(total)
        if not any(one.where == "zero_grad" for one in evidence.unlike):  # gradients are cleared, which is told
            self._note(record, total, None if made_good else multiple, weights)
        return None

    def _note_beside(self, record: StepRecord, count: int) -> None:
        """Note a term that counts more often than the labels' mean beside it."""
        self._beside = self._beside + 1 if count > 1 else 0
        if self._beside < STEPS or self._noted_beside:
            return
        self._noted_beside = True
        message = (
            f"What the loss has beside the labels' own term counts {count} times, and the labels' mean once: "
            "num_items_in_batch, the number of labels of the whole step, divides the labels' sum, and nothing divides "
            "the other term, which each micro-batch and rank adds again. A router's auxiliary loss is such a term."
        )
        remedy = f"Do nothing if that is meant. Else divide its coefficient by {count}."
        event = Event(record.step, KIND, "info", (), "loss", None, None, message, remedy, effect=float(count))
        self.notes = (*self.notes, event)

    def _note_first(self, record: StepRecord, total: float, count: int) -> None:
        """Note a first step that ends before its window is full, and is divided as if it were."""
        first, self._first = self._first, (total, count) if record.step == 1 else None
        if first is None or first[1] >= count or not (_near(total, 1.0) and _near(first[0], first[1] / count)):
            return
        message = (
            f"The first step has {micro_batches_of(first[1])}, divided as if there were {count}, as the next steps "
            f"have: its gradient is {first[0]:.3g} times that of its mean loss."
        )
        remedy = (
            f"Do nothing if that is meant. Else step where (i + 1) % {count} == 0: i % {count} == 0 is true of the "
            "first micro-batch of each pass."
        )
        event = Event(record.step, KIND, "info", (), "loss", None, None, message, remedy, effect=first[0])
        self.notes = (*self.notes, event)

    def _note(self, record: StepRecord, total: float, multiple: Multiple | None, weights: LabelWeights) -> None:
        """Note another multiple of the mean, which nobody has promised not to be."""
        count = max(weights.backwards)
        if multiple is None or not _is_evident(multiple, weights, count, record.world_size):
            self._steps = 0
            return
        self._steps = self._steps + 1 if _near(total, self._value) else 1
        self._value = total
        if self._steps < STEPS or self._noted:
            return
        self._noted = True
        same = _SEVERAL_LOSSES if multiple.micro_batches > 0 else ""
        remedy = f"Do nothing if that is meant. {same}{remedy_of(total)}"
        message = sentence_of(total, multiple, count, record.world_size)
        event = Event(record.step, KIND, "info", (), "loss", None, None, message, remedy, effect=total)
        self.notes = (*self.notes, event)


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEAR)


def multiple_of(total: float, micro_batches: int, ranks: int) -> Multiple | None:
    """Return the simplest product that ``total`` is; None for 1 and for what is none."""
    for powers in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)):
        if _near(total, float(micro_batches) ** powers[0] * float(ranks) ** powers[1]):
            return Multiple(*powers) if any(powers) else None
    return None


def _is_short(weights: LabelWeights) -> bool:
    """Tell whether the step had another number of micro-batches than its framework divides by."""
    promise = _of_the_mean(weights)
    promised = 0 if promise is None else promise.micro_batches
    return len(weights.backwards) > 1 or (promised > 0 and promised not in weights.backwards)


def _always_short(record: StepRecord, weights: LabelWeights) -> Finding | None:
    """Tell steps that never have as many micro-batches as the wrapper of their backward divides by.

    If they have more, that may be meant: the losses of a discriminator on real and on made-up rows, for example.
    """
    promise, count, total = weights.promise, max(weights.backwards), float(weights.totals.mean())
    if promise is None or not _is_mean(weights) or not _near(total * promise.micro_batches, float(count)):
        return None
    message = (
        f"The step's gradient is {total:.4g} times that of the mean of its losses, on all ranks alike: each step has "
        f"{micro_batches_of(count)}, and {promise.by} divides by {promise.micro_batches}."
    )
    remedy = (
        f"Let {micro_batches_of(promise.micro_batches)} make a step (under accelerate each within "
        f"accelerator.accumulate(model)), or configure {count}."
    )
    more = count > promise.micro_batches
    remedy = f"Do nothing if that is meant. {_SEVERAL_LOSSES}Else: {remedy}" if more else remedy
    finding = _finding("sum", message, remedy, total, record.step - LONG + 1)
    return replace(finding, severity="info") if more else finding


def _is_short_of_its_divisor(weights: LabelWeights, total: float, count: int) -> bool:
    """Tell whether a Trainer divides a short window's means by the configured number of micro-batches."""
    promise, configured = _of_the_mean(weights), weights.accumulation
    short = promise is not None and promise is weights.trainer and promise.micro_batches == 0 and count < configured
    once = [divisor for divisor in weights.constants.divisors if not _near(divisor, 1.0)] == [float(configured)]
    return short and once and _is_mean(weights) and _near(total * configured, float(count))


def _is_mean(weights: LabelWeights) -> bool:
    """Tell whether each rank's loss is a mean, by numbers that are all known, and alike on all ranks."""
    alike = _near(float(weights.totals.min()), float(weights.totals.max()))
    constants = weights.constants
    return weights.reductions == {MEAN} and not constants.by_tensor and not constants.of_each and alike


def _is_broken(multiple: Multiple, weights: LabelWeights, ranks: int) -> bool:
    """Tell whether somebody has promised that the sum is not this multiple."""
    times = abs(weights.constants.times)
    if weights.by_items:  # the Trainer multiplies by the ranks
        times = _times(weights) if weights.reductions == {SUM} else times
        return weights.reductions <= {MEAN, SUM} and (_near(times, 1.0) or _near(times, float(ranks)))
    promise = _of_the_mean(weights)
    if promise is None or not _is_mean(weights) or not (_near(times, 1.0) or _is_undone(weights)):
        return False
    return promise.micro_batches == 0 or multiple.micro_batches != 0


def _divides_again(weights: LabelWeights, total: float, ranks: int) -> float:
    """Return the number of micro-batches by which a sum is divided that the labels of the step divide; 0: by none.

    That they do is known of num_items_in_batch, and else seen: but for that number the labels weigh 1, and all alike.
    """
    constants, counts = weights.constants, (max(weights.backwards), weights.accumulation)
    numbers = (*constants.divisors, 1.0 / (constants.wrapper or 1.0))
    number = next((one for one in numbers if any(count > 1 and _near(one, float(count)) for count in counts)), 0.0)
    times = _times(weights) * number
    if weights.reductions != {SUM} or not (_near(times, 1.0) or _near(times, float(ranks))) or _near(total, 1.0):
        return 0.0
    if weights.by_items and constants.by_items and not constants.by_tensor:
        return number
    promised = (weights.by_items or weights.trainer is not None) and not constants.by_hand
    seen = math.isclose(total * number, 1.0, rel_tol=EXACT) and _is_one_weight(weights)
    return number if promised and seen else 0.0


def _is_one_weight(weights: LabelWeights) -> bool:
    return float(weights.largest.max()) <= float(weights.smallest.min()) * (1.0 + NEAR)


def _of_the_mean(weights: LabelWeights) -> Promise | None:
    """Return the promise of the mean: the wrapper's, else the trainer's."""
    return weights.trainer if weights.promise is None or weights.promise.as_given else weights.promise


def _is_undone(weights: LabelWeights) -> bool:
    """Tell whether a Trainer's loop multiplies by the very number that its wrapper divides by: no hyper-parameter."""
    promise, constants = weights.promise, weights.constants
    if weights.trainer is None or promise is None or promise.micro_batches == 0 or constants.wrapper is None:
        return False
    return _near(constants.times, float(promise.micro_batches)) and _near(constants.times * constants.wrapper, 1.0)


def _changed(weights: LabelWeights) -> float:
    """Return what a wrapper multiplies a loss by that it promises to pass on, or the sign alone of one that it divides.

    1 where that is not known.
    """
    promise, constants = weights.promise, weights.constants
    if promise is None or constants.wrapper is None or not _is_mean(weights):
        return 1.0
    if not promise.as_given:
        return math.copysign(1.0, constants.wrapper)
    return weights.passed * constants.wrapper if weights.passed > 0.0 and not constants.by_hand else 1.0


def _off_by_a_label_each(weights: LabelWeights, total: float, evidence: Evidence) -> int:
    """Return 1 if the loss is divided as for one label more in rows of the step than are trained; -1: for less in each.

    A row whose first token is padding has no first label.
    """
    if evidence.rows_per_rank is None or evidence.rows_sampled < 1.0:
        return 0
    more, rows = round(weights.labels / total) - weights.labels, sum(evidence.rows_per_rank)
    return int(0 < more <= rows) - (more == -rows)


def _is_by_items(weights: LabelWeights, ranks: int) -> bool:
    """Tell whether the loss is a sum over labels, divided by num_items_in_batch, and nothing more but by the ranks."""
    alone = weights.constants.by_items and not weights.constants.by_tensor
    times = _times(weights)
    return weights.reductions == {SUM} and alone and (_near(times, 1.0) or _near(times, float(ranks)))


def _times(weights: LabelWeights) -> float:
    """Return what the script and its wrapper multiply a sum by that num_items_in_batch divides."""
    constants = weights.constants
    return abs(constants.times * (constants.wrapper or 1.0)) / math.prod(constants.divisors)


def _is_evident(multiple: Multiple, weights: LabelWeights, count: int, ranks: int) -> bool:
    """Tell whether the script's own numbers are those that the multiple is made of.

    A sum over all ranks' labels shows by itself that their number divides it, and that the ranks do once more: each
    label counts alike, and all together count 1/N.
    """
    if weights.reductions == {SUM} and not weights.by_items and (multiple.micro_batches, multiple.ranks) == (0, -1):
        return ranks > 2 and _is_one_weight(weights)
    if not _is_mean(weights):
        return False
    constants, times = weights.constants, abs(weights.constants.times)
    if multiple.ranks > 0:  # twice a loss may be meant
        return ranks > 2 and _near(times, float(ranks))
    divided = sum(_near(divisor, float(count)) for divisor in constants.divisors)
    if multiple.micro_batches > 0:
        return _near(times, 1.0) and not divided
    if multiple.micro_batches < 0:
        return _near(times, 1.0) and divided >= 2
    return _near(times, 1.0) and any(_near(divisor, float(ranks)) for divisor in constants.divisors)


def _each_its_own(weights: LabelWeights) -> bool:
    """Tell whether each rank counts its own labels alike: its items are its own (average_tokens_across_devices off)."""
    alike = bool((weights.largest <= weights.smallest * (1.0 + NEAR)).all())
    return alike and all(_near(float(total), 1.0) for total in weights.totals)


def _promised(weights: LabelWeights, count: int) -> str:
    promise = _of_the_mean(weights)
    if promise is None:
        return "The loss was given num_items_in_batch, by which its sum over the labels is to be divided."
    by = promise.by
    if weights.trainer is not None and _is_undone(weights):
        undone = f"{by} divides by {count}, and before that the loss is multiplied by {count}"
        return f"{undone}. {weights.trainer.by} promises the mean."
    if weights.constants.wrapper is None or promise.micro_batches == 0:
        return f"{by} promises the mean."
    if any(_near(divisor, float(count)) for divisor in weights.constants.divisors):
        return f"{by} divides by the {count} micro-batches itself, and the script has divided the loss before."
    return f"{by} promises to divide by {count}, and multiplies by {weights.constants.wrapper:.4g}."


def _added_up(record: StepRecord, evidence: Evidence) -> Finding | None:
    """Tell a loss that a Trainer should have divided, and nothing divides."""
    if evidence.undivided is None or not evidence.micro_batches:
        return None
    count = evidence.micro_batches[0]
    sentence = sentence_of(float(count), Multiple(1, 0), count, record.world_size)
    message = f"{sentence} {evidence.undivided.by} promises the mean."
    return _finding("sum", message, remedy_of(float(count)), float(count), record.step)


def _finding(what: str, message: str, remedy: str, size: float, since: int) -> Finding:
    key = f"objective:{what}"
    return Finding(key, KIND, "warning", (), "loss", size, 1.0, message, remedy, since, effect=size)
