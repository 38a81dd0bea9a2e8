"""NaN, infinite and zero values, and parameters without a gradient: judged before anything is compared.

These are facts, not statistics, and no false-alarm rate applies. Those of a whole rank are reported at their first
step; those of some parameters or layers once it is clear that the model does not do so in health.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.distributed.parts import listed
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Severity, StepRecord
from ds_silent.text import named

SHOWN_LAYERS = 3
_HABIT, _AGAIN, _ALONE = 8, 4, 16  # measured steps
_PARAMETERS = "parameters"  # the place of a finding about those without a gradient
_LABELS = "Drop rows without label tokens (cut before their response, or empty)."
_DETACHED = (
    "Look for a detached loss, a loss multiplied by 0, parameters that do not require gradients, or a batch without "
    "labels."
)


class BrokenNumbers(Detector):
    """Report values that are not finite, and gradients that are zero.

    A loss of exactly 0 has no gradient in health, as that of a margin which all rows of a batch keep. It is reported
    where it is the same ranks' ``_ALONE`` steps in a row: of two exchangeable ranks that comes once in 6 10^8 windows.
    It may be all ranks' at last, but not from the beginning.
    """

    of_any_step = True

    def __init__(self) -> None:
        self._no_loss: list[int] = []  # ranks whose loss and gradient are 0, though they have labels
        self._in_row = self._began = 0  # steps with these ranks, and the first; a resume forgets it
        self._trained = False  # some rank has had a gradient

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        losses, zero = record.loss.per_rank or (), sorted(_zero(record, evidence))
        no_loss = [rank for rank in zero if losses[rank : rank + 1] == (0.0,) and not _unlabelled((rank,), evidence)]
        self._in_row = self._in_row + 1 if no_loss == self._no_loss else 1
        self._began = self._began if self._in_row > 1 else record.step
        self._no_loss = no_loss
        self._trained |= len(zero) < record.world_size
        fault = self._in_row >= _ALONE and (len(no_loss) < record.world_size or not self._trained)
        kept = () if fault else tuple(no_loss)
        found = zero_gradient(record, evidence, kept)
        if fault and no_loss == zero:
            found = [replace(one, since=self._began) for one in found]
        return non_finite(record, evidence) + found


class StaleParameters(Detector):
    """Report parameters that get a gradient on other ranks only, unless the model is conditional.

    A mixture of experts trains other parameters on other ranks from step to step. So a finding counts at once only
    behind ``_HABIT`` steps in which all ranks have trained the same; else the same parameters have to be without a
    gradient that often in a row.
    """

    stored = ("stale_key", "marks", "in_row", "habit", "since", "conditional")

    def __init__(self, alike: bool = True):
        self._alike = alike
        self._stale_key: str | None = None  # of the first finding
        self._marks: tuple[float, ...] = ()  # and which parameters those are
        self._in_row = self._habit = 0  # findings; steps without one before the first
        self._since = 0  # the first finding's step
        self._conditional = False  # the model trains other parameters on other ranks, in health

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        if self._conditional or not self._alike:
            return []
        found = stale_parameters(record, evidence)
        if not found and self._stale_key is None:
            self._habit += 1
            return []
        marks = tuple(evidence.stale_marks[rank] for rank in found[0].ranks) if found and evidence.stale_marks else ()
        if self._stale_key is None:
            self._stale_key, self._marks, self._since = found[0].key, marks, record.step
        counts = self._habit >= _HABIT or self._in_row >= _HABIT
        if found and found[0].key == self._stale_key and marks == self._marks:
            self._in_row += 1
            began = f", since step {self._since}." if self._since < record.step else "."
            since = replace(found[0], since=self._since, message=found[0].message.removesuffix(".") + began)
            return [since] if counts or self._in_row >= _HABIT else []
        self._conditional = bool(found) or not counts
        return []


class ZeroLayers(Detector):
    """Report layers, or single parameters, whose gradient is exactly zero on some ranks only, unless rows do so.

    A layer that not every row trains, such as the head of a task, comes and goes. So a rank's layer counts after
    ``_AGAIN`` steps in a row where all ranks have trained it in ``_HABIT``, else after ``_HABIT``; never again where it
    has come back before that. It is a note where rows are not dealt at random: other rows may leave the layer out.
    """

    key = "zero_layers"
    stored = ("trained", "in_row", "began", "told", "conditional", "marks")

    def __init__(self, alike: bool = True):
        self._alike = alike
        self._start(0, 1)

    def _start(self, ranks: int, columns: int) -> None:
        """Begin anew with a column for each layer, and a last one for parameters."""
        self._trained = np.zeros(columns)  # steps in which all ranks have trained it
        self._in_row = np.zeros((ranks, columns))  # measured steps
        self._began = np.zeros((ranks, columns))  # the first of them
        self._told = np.zeros((ranks, columns), dtype=bool)
        self._conditional = np.zeros(columns, dtype=bool)
        self._marks = np.zeros(ranks)  # which parameters it was in the step before

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        untrained = any(evidence.stale_parameters or ())
        if not self._alike or evidence.step_skipped or untrained or _zero(record, evidence):
            return []  # what is zero besides is no finding of its own
        none = _zero_columns(evidence, record.world_size)
        if none.shape != self._in_row.shape:
            self._start(*none.shape)
        if not none.any() and not self._in_row.any():  # nearly always
            self._trained += 1
            return []
        zero, marks = none & ~none.all(axis=0), np.array(evidence.zero_marks or (0.0,) * len(none))
        zero[:, -1] &= (self._in_row[:, -1] == 0) | self._told[:, -1] | (marks == self._marks)  # no other experts
        self._marks = marks
        self._conditional |= ((self._in_row > 0) & ~zero & ~self._told).any(axis=0)
        self._began = np.where(zero & (self._in_row == 0), record.step, self._began)
        self._in_row = np.where(zero, self._in_row + 1, 0)
        needed = np.where(self._trained >= _HABIT, _AGAIN, _HABIT)
        self._told = zero & (self._told | (self._in_row >= needed)) & ~self._conditional
        self._trained += ~none.any(axis=0)
        return self._finding(record, evidence) if self._told.any() else []

    def _finding(self, record: StepRecord, evidence: Evidence) -> list[Finding]:
        ranks = tuple(np.flatnonzero(self._told.any(axis=1)).tolist())
        columns = np.flatnonzero(self._told[:, :-1].any(axis=0))
        names = [] if evidence.layers is None else [evidence.layers.names[column] for column in columns]
        since = int(self._began[self._told].min())
        return [zero_layers(ranks, names, since, record, evidence)]


def _zero_columns(evidence: Evidence, ranks: int) -> npt.NDArray[np.bool_]:
    """(N, L + 1) whether a rank's gradient is zero in a layer, and in more parameters than where they are fewest."""
    last = np.array(evidence.zero_parameters or (0,) * ranks)[:, None] > 0
    return last if evidence.layers is None else np.hstack((np.isneginf(evidence.layers.log_norms), last))


def non_finite(record: StepRecord, extras: Evidence) -> list[Finding]:
    """Find a NaN or infinity in a rank's loss or gradient, or one that the aggregation has made.

    It is one fault however far it spreads: the event of its first step names where it began. An fp16 step that the
    dynamic loss scale skipped has infinite gradients by design; there only the losses count.
    """
    bad_loss = _not_finite(record.loss.per_rank)
    bad_gradient = set() if extras.step_skipped else _not_finite(record.grad_norm.per_rank) | set(extras.non_finite)
    ranks = tuple(sorted(bad_loss | bad_gradient))
    layers = [layer for rank in ranks if (layer := extras.non_finite.get(rank)) is not None]
    where = layers[0] if layers else ("loss" if bad_loss else "gradient")
    empty = tuple(sorted(bad_loss & _zero(record, extras)))  # a loss over nothing: no second fault
    if ranks:
        what = " and ".join(name for name, bad in (("loss", bad_loss), ("gradient", bad_gradient)) if bad)
        began = f", first in {layers[0]}" if layers else ""
        verb = "are" if bad_loss and bad_gradient else "is"
        message = f"The {what} of {named(ranks, record.world_size)} {verb} not finite{began}."
    elif extras.step_skipped:
        return []
    elif _bad(record.grad_norm.aggregated):
        where, message = "aggregated gradient", "The aggregated gradient is not finite although every rank's own is."
    elif _bad(record.direction.mean_cosine) and min(record.grad_norm.per_rank or (0.0,)) > 0.0:
        where, message = "direction", "A gradient's sketch is not finite although its norm is: it overflows in fp32."
    else:
        return []
    known, remedy = _reached(record, extras)
    if empty:
        message += f" The gradient of {named(empty, record.world_size)} is exactly zero{_unlabelled(empty, extras)}."
        remedy = f"{_LABELS} {remedy}"
    message += f" {known}"
    return [Finding("broken-numbers", "non-finite", "error", ranks, where, None, None, message, remedy, record.step)]


def _reached(record: StepRecord, extras: Evidence) -> tuple[str, str]:
    """Say whether the value has reached the weights, and what to do."""
    first = "at weights that nothing has initialised (a layer made on the meta device), " * (record.step == 1)
    look = f"Look {first}at the rows of this step and at the layer named; lower the learning rate or the loss scale"
    if extras.update_skipped or extras.step_skipped:
        return "The optimizer skipped this step: the weights do not hold the value.", f"{look}."
    aggregated = record.grad_norm.aggregated
    if aggregated is None:
        known = "The aggregated gradient was not measured: whether the weights hold the value is not known."
        return known, f"{look}; if the loss stays so at the next steps, go back to the last checkpoint."
    if math.isfinite(aggregated):
        return "The aggregated gradient is finite: the value did not reach the weights in this step.", f"{look}."
    known = "The aggregated gradient holds it and the optimizer did not skip the step: the weights hold it by now."
    return known, f"{look}; go back to the last checkpoint before this step."


def zero_gradient(record: StepRecord, extras: Evidence, without: Collection[int] = ()) -> list[Finding]:
    """Find ranks whose whole gradient is exactly zero, ``without`` those in which that is no fault."""
    zero = _zero(record, extras) - _not_finite(record.loss.per_rank) - set(without)  # told by non_finite
    if not zero:
        return []
    ranks = tuple(sorted(zero))
    cause = _unlabelled(ranks, extras)
    message = f"The gradient of {named(ranks, record.world_size)} is exactly zero in all parameters{cause}."
    remedy = _LABELS if cause else _DETACHED
    key = f"zero-gradient:{','.join(map(str, ranks))}"
    return [Finding(key, "zero-gradient", "error", ranks, "gradient", 0.0, None, message, remedy, record.step)]


def _zero(record: StepRecord, extras: Evidence) -> set[int]:
    norms = record.grad_norm.per_rank or ()
    zero = {rank for rank, norm in enumerate(norms) if norm == 0.0} if 0.0 in norms else set()
    return zero | extras.zero_gradient


def _unlabelled(ranks: tuple[int, ...], extras: Evidence) -> str:
    tokens = extras.label_tokens
    known = tokens is not None and all(tokens[rank] == 0 for rank in ranks)
    return ": none of its rows has a label token" if known else ""


def stale_parameters(record: StepRecord, extras: Evidence) -> list[Finding]:
    """Find ranks on which parameters get no gradient that get one on other ranks.

    A model with conditional computation does this in health, on other ranks at other steps.
    """
    stale = extras.stale_parameters or ()
    if not any(stale):  # nearly always
        return []
    missing = tuple(rank for rank, count in enumerate(stale) if count > 0)
    most = max(stale)
    which = _whole_layers(missing, extras) if extras.stale_name is None else f": {extras.stale_name}"
    message = (
        f"{named(missing).capitalize()} got no gradient for {most} trainable parameter{'s' if most > 1 else ''} that "
        f"other ranks do train{which}."
    )
    remedy = (
        "Compare requires_grad and the model's branches between the ranks; if the model skips layers on purpose "
        "(mixture of experts), this is expected."
    )
    key, where, score = f"stale:{','.join(map(str, missing))}", _PARAMETERS, float(most)
    return [Finding(key, "zero-gradient", "warning", missing, where, score, 0.0, message, remedy, record.step)]


def zero_layers(
    ranks: tuple[int, ...], layers: Sequence[str], since: int, record: StepRecord, extras: Evidence
) -> Finding:
    """Make the finding of layers whose gradient is exactly zero on these ranks alone; of none: of parameters."""
    where, what = (
        (layers[0], listed(layers, SHOWN_LAYERS, "layers")) if layers else (extras.zero_names, extras.zero_names)
    )
    rest = "the other rank" if record.world_size - len(ranks) == 1 else "the other ranks"
    message = f"The gradient of {what} is exactly zero on {named(ranks)} since step {since}, and not on {rest}."
    remedy = (
        "Look for a branch, a factor of 0, a mask or a hook that takes it out on this rank; if only some rows train it "
        "on purpose, this is expected."
    )
    key = f"zero-layers:{','.join(map(str, ranks))}"
    severity: Severity = "warning" if extras.dealt == "random" else "info"
    return Finding(key, "zero-gradient", severity, ranks, where, None, None, message, remedy, since)


def _whole_layers(ranks: tuple[int, ...], extras: Evidence) -> str:
    """Name the layers in which these ranks got no gradient at all, and others did."""
    layers = extras.layers
    if layers is None:
        return ""
    none = np.isneginf(layers.log_norms)
    missed = none[list(ranks)].all(axis=0) & ~none.all(axis=0)
    names = [layers.names[layer] for layer in np.flatnonzero(missed)]
    return f", among them all of {listed(names, SHOWN_LAYERS, 'layers')}" if names else ""


def _not_finite(values: Sequence[float] | None) -> set[int]:
    if all(map(math.isfinite, values or ())):  # nearly always
        return set()
    return {rank for rank, value in enumerate(values or ()) if _bad(value)}


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
