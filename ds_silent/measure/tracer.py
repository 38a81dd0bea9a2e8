"""Make a line of the trace of what was gathered of a step, beside its record: pure, but for the head.

tracer = Tracer(capture, config, layout)        # on the writing rank
tracer.begin(backwards)                         # on the training's thread, as the first traced step ends
record = replace(record, traced=tracer.step(gathered, record, context))     # once per measured step, in order

What the optimizer used of a step is known with the next measured one, so a step's line is complete only then
(:class:`ds_silent.sinks.jsonl.TraceSink`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.capture.step import StepCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.layout import Layout
from ds_silent.exchange.observation import LEFT_OUT, Gathered, on_all
from ds_silent.exchange.row_ids import all_rows
from ds_silent.framework import layers_of
from ds_silent.maths.rounding_bound import step_rounding
from ds_silent.maths.sketch import fold
from ds_silent.measure.record import Context
from ds_silent.preflight.inventory import dropout_probabilities
from ds_silent.records import StepRecord
from ds_silent.rules.settings_in_force import settings_in_force
from ds_silent.sinks.run_directory import versions_of
from ds_silent.trace import Gradient, Head, Layer, Rows, Step, Traced, Used, Weighed, layer_size
from ds_silent.trace import Tensor as TracedTensor
from ds_silent.trace.form import Floats

logger = logging.getLogger("ds_silent")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class _Measured:
    """Of the measurement before, whose optimizer the next tells of."""

    step: int
    factors: Tensor  # (N,) from what was reduced to what the step began with, times the loss scale
    errors: Tensor  # (N,) squared lengths of what such a factor does not explain


class Tracer:
    """See the module docstring; ``head``: of this run, None until the first traced step has ended."""

    def __init__(self, capture: StepCapture, config: SilentConsistencyConfig, layout: Layout):
        assert config.trace is not None
        assert capture.traced is not None
        self._capture, self._traced, self._config, self._layout = capture, capture.traced, config, layout
        self._size, self._layer_size = config.trace.size, layer_size(len(capture.layer_names))
        self.head: Head | None = None
        self._past: _Measured | None = None
        self._applied_before = False

    def begin(self, backwards: int) -> None:
        """Make the head: the first forward is over by now, in which the parameters' order was seen.

        ``backwards`` of this step are the micro-batches of a loop that has not said how many it takes.
        """
        if self.head is not None:
            return
        assert self._config.trace is not None
        framework, counts, ranks = self._capture.framework, self._traced.samples.counts, self._capture.shape.ranks
        names, layers = layers_of(list(framework.names))
        order = self._traced.order.of_parameters()
        facts = framework.names, framework.shapes, framework.parameters, layers, counts, order
        arithmetic, micro_batches = self._capture.arithmetic, framework.micro_batches * framework.micro_batches_at_once
        micro_batches = max(1, backwards) if micro_batches == 1 else micro_batches
        self.head = Head(
            interval=self._config.interval * self._config.trace.interval,
            size=self._size,
            ranks=ranks,
            micro_batches=micro_batches,
            framework=framework.words.framework,
            precision=_PRECISIONS.get(arithmetic.communication, _short(arithmetic.communication)),
            rounding=step_rounding(arithmetic, ranks, micro_batches),
            layer_size=self._layer_size,
            layers=tuple(map(Layer, names)),
            tensors=tuple(
                TracedTensor(name, shape, _short(parameter.dtype), layer, samples, place)
                for name, shape, parameter, layer, samples, place in zip(*facts, strict=True)
            ),
            sketch_size=self._layout.size,
            settings=self._settings(),
            versions=versions_of(framework.words.framework),
        )

    def _settings(self) -> dict[str, dict[str, object]]:
        try:
            found = settings_in_force(self._capture.framework)
        except Exception as error:  # of an optimizer of somebody else's; the steps can be compared without
            logger.debug("ds_silent: the trace holds no settings: %s: %s", type(error).__name__, error)
            return {}
        states = ", ".join(self._capture.settings.autocast.state)
        known = {name: {"value": value, "from": origin} for name, (value, origin) in found.items()}
        dropping = list(dropout_probabilities(self._capture.framework.module).values())
        drops = f"{', '.join(f'{p:g}' for p in sorted(set(dropping)))} in {len(dropping)} modules" if dropping else ""
        more = (("autocast", states, "framework"), ("dropout", drops, "yours"))
        return known | {name: {"value": value, "from": origin} for name, value, origin in more if value}

    def step(self, gathered: Gathered, record: StepRecord, context: Context) -> Traced:
        """Return what a measured step adds to the trace."""
        past, used = self._past, self._used(gathered)
        self._past = _measured(gathered)
        line = self._line(gathered, record, context) if context.traces else None
        return Traced(line, None if past is None else past.step, used)

    def _line(self, gathered: Gathered, record: StepRecord, context: Context) -> Step:
        loss, objective = record.loss, record.objective
        numbers = objective.labels, objective.weight_sum, objective.weight_min, objective.weight_max
        known = [number for number in numbers if number is not None]
        rows = None if gathered.rows is None else all_rows(gathered.rows)
        weights = None if gathered.weights is None else self._traced.samples.whole(gathered.weights)
        return Step(
            step=gathered.step,
            samples=record.samples,
            rows=None if rows is None else Rows(rows[0], rows[1], "ids" if rows[2] else "content"),
            loss=loss.mean,
            losses=loss.std,
            objective=Weighed(*known) if len(known) == len(numbers) else None,
            rates=context.rates,
            applied=None,
            local=self._local(gathered),
            reduced=self._reduced(gathered, record.grad_norm.aggregated),
            weights=None if weights is None else _floats(weights),
            head=self.head,
        )

    def _local(self, gathered: Gathered) -> Gradient | None:
        """Return the mean of the ranks' gradients."""
        if not on_all(gathered.local.seen):
            return None
        scale, each, sums = gathered.loss.scale, gathered.each, gathered.sums
        if each is not None and each.layer_sketches is not None:
            mean = (each.sketches / scale[:, None]).mean(0)
            return self._gradient(mean, (each.layer_sketches / scale[:, None, None]).mean(0))
        if sums is not None and sums.layers is not None:
            return self._gradient(sums.mean / scale[0], sums.layers / scale[0])
        return None

    def _reduced(self, gathered: Gathered, norm: float | None) -> Gradient | None:
        scale, layers = gathered.loss.scale[0], gathered.layer_aggregate
        if norm is None or layers is None or not on_all(gathered.reduced.seen):
            return None
        return self._gradient(gathered.aggregate / scale, layers / scale, norm)

    def _gradient(self, sketch: Tensor, layers: Tensor, norm: float | None = None) -> Gradient:
        """Fold both to what a line holds; without its norm it is the sketch's."""
        by_layer = fold(layers, self._layer_size)
        norm = float(sketch.norm()) if norm is None else norm
        return Gradient(norm, _floats(fold(sketch, self._size)), _floats(by_layer.norm(dim=1)), _floats(by_layer))

    def _used(self, gathered: Gathered) -> Used | None:
        """Return what the optimizer used of the measurement before: a factor of all ranks' shares together.

        Each rank has compared its own share: applied = factor * share + error. Shares do not overlap, so the squares
        add up, and how far a rank's factor is from all ranks' is an error too.
        """
        own, past = gathered.applied, self._past
        stepped = own.seen > 0
        if past is None or past.step >= gathered.step or not bool((own.seen != 0.0).all()):
            return None
        if not bool(stepped.any()):
            left_out = bool((own.seen == LEFT_OUT).all())
            return Used(0.0, 0.0) if left_out or self._applied_before else None  # else its calls were never seen
        self._applied_before = True
        total = float(own.squared.sum())
        if not bool(stepped.all()) or not math.isfinite(total) or total <= 0.0:
            return None
        holds = own.squared > 0.0
        squares, errors = own.squared[holds], (own.error + own.factor.square() * past.errors)[holds]
        factors = (own.factor * past.factors)[holds]
        factor = (factors * squares).sum() / total
        apart = (1.0 - factor / factors).square() * (squares - errors).clamp(min=0.0)
        return Used(float(factor), math.sqrt(float(errors.sum() + apart.sum()) / total))


def _measured(gathered: Gathered) -> _Measured | None:
    """Return what the next measurement's optimizer is compared with; None where the aggregate is not known."""
    reduced = gathered.reduced
    if not on_all(reduced.seen):
        return None
    moved = (reduced.handed_seen > 0) & (reduced.squared > 0.0)
    factors = torch.where(moved, reduced.handed_factor, 1.0) * gathered.loss.scale[0]
    return _Measured(gathered.step, factors, torch.where(moved, reduced.handed_error, 0.0))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _floats(values: Tensor) -> Floats:
    found: Floats = values.float().numpy()
    return found
