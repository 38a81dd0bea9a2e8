"""What one rank knows of the step under way, made into one sample: no framework here.

    sampler = StepSampler(local, rows, parts)
    sampler.loss(loss)                                   # per micro-batch
    sampler.sample(aggregated, scale, hashes)            # between the reduction and the optimizer
    sampler.apply(index, start, values)                  # from inside the optimizer's step: what it is about to use
    sampler.end_step(applied=True)                       # the comparison of the two travels with the next sample

Whatever breaks in here breaks on one rank only: :meth:`StepSampler.guarded` keeps the first error, and the next sample
says "failed", upon which all ranks switch off together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.local import LocalGradient
from ds_silent.capture.rows import RowIds
from ds_silent.exchange import LocalSample
from ds_silent.integrity import multiple_of
from ds_silent.lockstep import BROKE, UNSEEN, SparseGradientError

logger = logging.getLogger("ds_silent")
_Result = TypeVar("_Result")
Part = tuple[int, int, Tensor]
"""(parameter, first element, values): a piece of a gradient."""


@dataclass(frozen=True)
class Sends:
    """Which optional parts a sample has; the same on every rank."""

    layer_sketches: bool
    layer_aggregates: bool
    applied: bool  # what the optimizer applies is observed


class StepSampler:
    """Collects one step's observations of one rank."""

    def __init__(self, local: LocalGradient, rows: RowIds, sends: Sends):
        self._local, self._rows, self._sends = local, rows, sends
        self._failure: Exception | None = None
        self._before: LocalSample | None = None  # of the step's reduction
        self._aggregate: Tensor | None = None  # sketch of this rank's share, until the optimizer has run
        self._of_last_step: dict[str, float | Tensor] = {}
        self._start()

    def _start(self) -> None:
        self._losses: list[Tensor] = []
        self._forward_losses: list[Tensor] = []
        self._applied = False

    # -- during the step -----------------------------------------------------------------------------------------

    def loss(self, loss: Tensor) -> None:
        """A micro-batch's loss, unscaled, as its backward begins."""
        self._forward_losses.clear()
        self._losses.append(loss.detach())

    def forward_loss(self, loss: Tensor) -> None:
        """A loss that a forward returned: it counts where nobody calls :meth:`loss`."""
        self._forward_losses.append(loss.detach())

    def sample(
        self, aggregated: Iterable[Part] | None, scale: float | Tensor, gram: Tensor | None, hashes: Tensor | None
    ) -> LocalSample:
        """This rank's observation of the step.

        Args:
            aggregated: this rank's share of the aggregated gradient; None where it is hidden.
            scale: factor on all gradients of this step.
            gram: this rank's part of the exact inner products.
            hashes: int64, see :mod:`ds_silent.replicas`; the first is the replica's where ``scalars`` say so.
        """
        self._before = self.guarded(lambda: self._sample(scale, gram))
        return self.sample_again(aggregated, hashes)

    def sample_again(self, aggregated: Iterable[Part] | None, hashes: Tensor | None) -> LocalSample:
        """The step's observation with what has come out of the reduction: of the first one, or of a repetition."""
        before = self._before
        sample = None if before is None else self.guarded(lambda: self._with_aggregate(before, aggregated, hashes))
        if sample is None:
            self._local.accumulator.clear()
            self._aggregate = None
            failed = UNSEEN if isinstance(self._failure, SparseGradientError) else BROKE
            return LocalSample({"failed": failed}, gram=None if before is None else before.gram)
        return sample

    def apply(self, parts: Iterable[Part]) -> None:
        """What the optimizer is about to apply, of this rank's share of the parameters."""
        self._applied = True
        if self._aggregate is not None:
            for index, start, values in parts:
                self._local.accumulator.add(index, values, start=start, square=False)

    def end_step(self, observed: bool) -> None:
        """The optimizer has run, or was skipped.

        Args:
            observed: whether this step was measured and its applied gradient can be seen.
        """
        self._of_last_step = {}
        if observed and self._sends.applied and self._aggregate is not None:
            self._of_last_step = self.guarded(self._compare_applied) or {}
        self._aggregate = None
        self._local.start_step()
        self._rows.end_step()
        self._start()

    # -- errors -----------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Remember the first internal error and say it once; the next sample tells all ranks."""
        if self._failure is None:
            self._failure = error
            if isinstance(error, SparseGradientError):
                logger.warning("ds_silent: %s", error)
                return
            logger.warning("ds_silent: internal error on rank %d: %s: %s", dist.get_rank(), type(error).__name__, error)

    def guarded(self, function: Callable[[], _Result]) -> _Result | None:
        """Run what touches only this rank. A bug in it must not stop the training: all ranks switch off instead."""
        if self._failure is None:
            try:
                return function()
            except Exception as error:
                self.fail(error)
        return None

    # -- putting it together ----------------------------------------------------------------------------------------

    def _sample(self, scale: float | Tensor, gram: Tensor | None) -> LocalSample:
        """What was there before the reduction."""
        local = self._local
        scalars: dict[str, float | Tensor] = {
            "gradient_seen": float(local.seen),
            "norm_seen": float(local.norm_seen),
            "fired": float(local.fired),
            "loss_scale": scale,
            **self._of_last_step,
        }
        losses = self._losses or self._forward_losses
        if losses:
            scalars["loss_sum"] = torch.stack([loss.float().reshape(()) for loss in losses]).sum()
            scalars["loss_count"] = float(len(losses))
        for name, value in (
            ("leftover_squared", local.leftover),
            ("micro_squared", local.micro_squared),
            ("label_tokens", self._rows.take_label_tokens()),
        ):
            if value is not None:
                scalars[name] = value
        sketches, squares = local.accumulator.take()
        scalars["squared_norm"] = squares.sum()
        return LocalSample(
            scalars=scalars,
            sketch=sketches.sum(0) if local.sketching else None,
            layer_squares=squares,
            ids=self._rows.take(squares.device),
            layer_sketches=sketches if self._sends.layer_sketches and local.sketching else None,
            gram=gram,
        )

    def _with_aggregate(
        self, before: LocalSample, aggregated: Iterable[Part] | None, hashes: Tensor | None
    ) -> LocalSample:
        local, scalars = self._local, dict(before.scalars)
        aggregates: Tensor | None = None
        if aggregated is not None:
            for index, start, values in aggregated:
                local.accumulator.add(index, values, start=start, sketching=local.sketching)
            aggregates, squares = local.accumulator.take()
            scalars["aggregate_squared"] = squares.sum()
            self._aggregate = aggregates.sum(0) if local.sketching else None
        scalars["aggregate_seen"] = float(aggregated is not None)
        return replace(
            before,
            scalars=scalars,
            aggregate=self._aggregate,
            layer_aggregates=aggregates if self._sends.layer_aggregates and local.sketching else None,
            hashes=hashes,
        )

    def _compare_applied(self) -> dict[str, float | Tensor]:
        """Applied = factor * aggregate + error, of this rank's share; all of it stays on the device."""
        assert self._aggregate is not None
        if not self._applied:
            return {"applied_seen": -1.0}
        applied, _ = self._local.accumulator.take()
        total, aggregate = applied.sum(0), self._aggregate
        factor, error = multiple_of(total, aggregate)
        return {
            "applied_seen": 1.0,
            "applied_factor": factor,
            "applied_error": torch.dot(error, error),
            "applied_squared": torch.dot(total, total),
        }
