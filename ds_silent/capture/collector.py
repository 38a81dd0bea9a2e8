"""What one rank knows of the step under way, made into one observation: no framework here.

    collector = StepCollector(local, rows, sends, together)
    collector.loss(loss)                                 # per micro-batch; or its share(loss)
    collector.reduced(aggregated)                        # the reduction has ended; the script may change its result now
    collector.observation(aggregated, known, hashes)     # the step begins
    collector.apply(parts)                               # from inside the optimizer's step: what it is about to use
    collector.end_step(observed=True)                    # the comparison of the two travels with the next one

Whatever breaks in here breaks on one rank only, see :mod:`ds_silent.distributed.together`: the next observation says
"failed", and all ranks switch off together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_silent.capture.batch_rows import RowIds
from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.distributed.together import Together
from ds_silent.exchange.observation import (
    BROKE,
    LEFT_OUT,
    Applied,
    Code,
    Local,
    Loss,
    Objective,
    Observation,
    Reduced,
    Status,
)
from ds_silent.framework import Part
from ds_silent.maths.rounding_bound import multiple_of

# ----------------------------------------------------------------------------------------------------------------------
# Who hears of a step: what :class:`ds_silent.capture.step.StepCapture` calls.


class Listener(Protocol):
    """The observer's steps; the last four are played."""

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it, by which ``measures`` is asked."""

    def measures(self, step: int) -> bool:
        """Whether a step is measured; the same answer on every rank."""

    def measures_exactly(self, step: int) -> bool:
        """Whether a measured step is also measured exactly; the same answer on every rank."""

    def before_reduction(self) -> None:
        """A boundary's gradients are there, and reduced next where reductions come behind the backward."""

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run."""

    def dropped(self) -> None:
        """What was reduced since the last step belongs to none."""

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced."""


class Owner(Protocol):
    """The observer, as a training sees it that saves and ends."""

    @property
    def closed(self) -> bool:
        """Whether it ended for good, and not because it broke."""

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be written: put on disk what is known."""

    def close(self) -> None:
        """The training ends."""


# ----------------------------------------------------------------------------------------------------------------------
# Whether a script changed gradients between the reduction and the step, told without reading them again.
#
# Clipping and its like are the script's own business: what is reduced is looked at before, what is applied after
# them.


FEW = 8  # elements of each tensor


@dataclass(frozen=True)
class Remembered:
    """Of pieces of a gradient, which are not kept."""

    places: tuple[tuple[int, int], ...]  # where each lies, and how often torch has seen it written to
    few: Tensor | None  # elements of all, one after the other


def remember(values: Sequence[Tensor]) -> Remembered:
    """Pieces of any shape and floating dtype, on one device."""
    return Remembered(_places(values), _few(values))


def moved(before: Remembered, values: Sequence[Tensor]) -> bool:
    """Whether the pieces are others, or were written to since; ``tensor.data`` hides from this."""
    return _places(values) != before.places


def differs(before: Remembered, values: Sequence[Tensor]) -> Tensor | None:
    """fp32 (): 1 where a few elements differ, else 0; NaN differs from itself. None where there are no pieces.

    Scaling shows in every element that is not zero; what is written behind autograd's back to single elements may not.
    """
    few = _few(values)
    if few is None or before.few is None:
        return None
    return (few != before.few).any().float()


def _places(values: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((value.data_ptr(), 0 if value.is_inference() else value._version) for value in values)


def _few(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([_some(value) for value in values]) if values else None


def _some(value: Tensor) -> Tensor:
    """Elements that are spread evenly: one view of a contiguous tensor, because this is done for each at every step."""
    step, count = max(1, value.numel() // FEW), min(FEW, value.numel())
    if value.is_contiguous() and not value.requires_grad:
        return value.as_strided((count,), (step,))
    return value.detach().reshape(-1)[::step][:FEW]


# -- What one rank knows of the step under way, made into one observation ----------------------------------------------


_Taken = tuple[Tensor, Tensor]  # sketches and squared norms by layer


@dataclass(frozen=True)
class _Reduced:
    """This rank's share of the aggregate as it came out of the reduction."""

    taken: _Taken
    remembered: Remembered


@dataclass(frozen=True)
class Sends:
    """Which optional parts an observation has; the same on every rank."""

    layer_sketches: bool
    layer_aggregates: bool
    applied: bool  # what the optimizer applies is observed
    counted: frozenset[int] | None = None  # parameters that count in the whole model's norm, where others hold the rest


class Known(NamedTuple):
    """What is known of a step before the aggregate is looked at."""

    scale: float | Tensor  # factor on all gradients
    gram: Tensor | None  # this rank's part of the exact inner products
    code: Code[float | Tensor]
    objective: Objective[float | Tensor]
    replica_seen: float  # 1 where the first hash is the replica's
    order: float = 0.0  # that rows are dealt in, see :class:`ds_silent.capture.data_facts.Deal`


class StepCollector:
    """Collects what makes one rank's observation of a step."""

    def __init__(self, local: LocalGradient, rows: RowIds, sends: Sends, together: Together):
        self._local, self._rows, self._sends, self._together = local, rows, sends, together
        self._before: Observation | None = None  # of the step's reduction
        self._aggregate: Tensor | None = None  # sketch of this rank's share, until the optimizer has run
        self._of_last_step: Applied[float | Tensor] = Applied()
        self._start()

    def _start(self) -> None:
        self._local_taken: _Taken | None = None  # the local gradient's, where the reduction was seen to end
        self._reduced: _Reduced | None = None
        self._losses: list[Tensor] = []
        self._shares: list[Tensor] = []
        self._forward_losses: list[Tensor] = []
        self._losses_behind = 0  # of the forwards': whose backward has come
        self._applied = False

    # -- during the step -----------------------------------------------------------------------------------------

    def loss(self, loss: Tensor) -> None:
        """A micro-batch's loss, unscaled, as its backward begins."""
        self._forward_losses.clear()
        self._losses.append(loss.detach())

    def share(self, loss: Tensor) -> None:
        """What a micro-batch adds to the step's loss, where nobody knows its own: a script has divided it."""
        self._forward_losses.clear()
        self._shares.append(loss.detach())

    def forward_loss(self, loss: Tensor) -> None:
        """A loss that a forward returned: it counts where nobody calls :meth:`loss`."""
        self._forward_losses.append(loss.detach())

    def late_forward_loss(self, loss: Tensor) -> None:
        """The same, known only when the backward is under way; :meth:`loss` may have counted it."""
        if not self._losses and not self._shares:
            self._forward_losses.append(loss.detach())

    def reduced(self, aggregated: Iterable[Part] | None) -> None:
        """The reduction has ended: look at its result before the script can change it. The last such call counts."""
        sketches, squares = self._local.accumulator.take()
        if self._local_taken is not None:  # another backward at the same boundary
            sketches, squares = sketches + self._local_taken[0], squares + self._local_taken[1]
        self._local_taken = sketches, squares
        if aggregated is not None:
            parts = list(aggregated)
            values = [part for _, _, part in parts]
            self._reduced = _Reduced(self._read(parts), remember(values))

    def _read(self, parts: Iterable[Part]) -> _Taken:
        """Of pieces of the aggregate. The accumulator is empty before and after."""
        self._local.accumulator.add_all(parts, sketching=self._local.sketching)
        return self._local.accumulator.take()

    def observation(self, aggregated: Iterable[Part] | None, known: Known, hashes: Tensor | None) -> Observation:
        """This rank's observation of the step.

        Args:
            aggregated: this rank's share of the aggregated gradient; None where it is hidden.
            known: what is known without it.
            hashes: int64, see :mod:`ds_silent.kernels.checksums`; the first is the replica's, where that is due.
        """
        self._before = self._together.alone(self._before_reduction, known)
        return self._completed(aggregated, hashes, self._reduced)

    def observation_again(self, aggregated: Iterable[Part] | None, hashes: Tensor | None) -> Observation:
        """The step's observation with what has come out of the reduction that was repeated; without the replica's."""
        if self._before is not None:
            self._before = replace(self._before, reduced=Reduced())
        return self._completed(aggregated, hashes, None)

    def _completed(
        self, aggregated: Iterable[Part] | None, hashes: Tensor | None, reduced: _Reduced | None
    ) -> Observation:
        before = self._before
        alone = self._together.alone
        whole = None if before is None else alone(self._with_aggregate, before, aggregated, hashes, reduced)
        return Observation(Status(failed=BROKE)) if whole is None else whole

    def apply(self, parts: Iterable[Part]) -> None:
        """What the optimizer is about to apply, of this rank's share of the parameters."""
        self._applied = True
        if self._aggregate is not None:
            self._local.accumulator.add_all(parts, square=False)

    def backward_ended(self) -> None:
        """What was forwarded until now is in the gradients, or never will be."""
        self._losses_behind = len(self._forward_losses)
        self._rows.backward_ended()

    def drop(self) -> None:
        """Forget what is in the gradients; a forward whose backward is to come stays."""
        to_come = self._forward_losses[self._losses_behind :]
        self._aggregate = None
        self._local.drop()
        self._rows.drop()
        self._start()
        self._forward_losses = to_come

    def end_step(self, observed: bool, left_out: bool = False) -> None:
        """The optimizer has run, or was skipped.

        Args:
            observed: whether this step was measured and its applied gradient can be seen.
            left_out: whether the script has thrown the gradient away.
        """
        self._of_last_step = Applied()
        if observed and self._sends.applied and self._aggregate is not None:
            self._of_last_step = self._together.alone(self._compare_applied, left_out) or Applied()
        self._aggregate = None
        self._local.start_step()
        self._rows.end_step()
        self._start()

    # -- putting it together ----------------------------------------------------------------------------------------

    def _before_reduction(self, known: Known) -> Observation:
        """What was there before the reduction."""
        local, tokens = self._local, self._rows.take_label_tokens()
        losses = self._losses or self._shares or self._forward_losses
        shares = len(losses) if losses is self._shares else 1  # they add up to the mean of the micro-batches'
        sketches, squares = self._local_taken or local.accumulator.take()
        return Observation(
            loss=Loss(
                total=torch.stack([loss.float().reshape(()) for loss in losses]).sum() * shares if losses else 0.0,
                count=float(len(losses)),
                scale=known.scale,
                tokens=0.0 if tokens is None else tokens,
                order=known.order,
            ),
            local=Local(
                seen=float(local.seen),
                norm_seen=float(local.norm_seen),
                gram_seen=float(known.gram is not None),
                squared=squares.sum(),
                leftover_squared=0.0 if local.leftover is None else local.leftover,
                micro_squared=0.0 if local.micro_squared is None else local.micro_squared,
                fired=float(local.fired),
            ),
            reduced=Reduced(replica_seen=known.replica_seen),
            applied=self._of_last_step,
            code=known.code,
            objective=known.objective,
            sketch=sketches.sum(0) if local.sketching else None,
            layer_squares=squares,
            ids=self._rows.take(squares.device),
            layer_sketches=sketches if self._sends.layer_sketches and local.sketching else None,
            gram=known.gram,
        )

    def _with_aggregate(
        self,
        before: Observation,
        aggregated: Iterable[Part] | None,
        hashes: Tensor | None,
        reduced: _Reduced | None,
    ) -> Observation:
        """With what the reduction brought, and whether the script has changed it since."""
        local = self._local
        found, replica_seen = before.reduced, before.reduced.replica_seen
        aggregates: Tensor | None = None
        aggregate: Tensor | None = None
        if aggregated is not None:
            parts = list(aggregated)
            aggregates, squares = self._read(parts) if reduced is None else reduced.taken
            found = Reduced(seen=1.0, squared=squares.sum(), replica_seen=replica_seen)
            aggregate = self._aggregate = aggregates.sum(0) if local.sketching else None
            if reduced is not None:
                found = self._handed(reduced, parts, found)
            if self._sends.counted is not None:
                found = replace(found, counted=_squared(parts, self._sends.counted))
        return replace(
            before,
            reduced=found,
            aggregate=aggregate,
            layer_aggregates=aggregates if self._sends.layer_aggregates and local.sketching else None,
            hashes=hashes,
        )

    def _handed(self, reduced: _Reduced, parts: list[Part], found: Reduced[float | Tensor]) -> Reduced[float | Tensor]:
        """What is applied is compared with what the step began with; a second look only where a script changed that."""
        values = [part for _, _, part in parts]
        if not moved(reduced.remembered, values):
            changed = differs(reduced.remembered, values)
            return found if changed is None else replace(found, handed_seen=-changed)
        sketches, squares = self._read(parts)
        found = replace(found, handed_seen=1.0, handed_squared=squares.sum())
        if self._aggregate is None:
            return found
        before, self._aggregate = self._aggregate, sketches.sum(0)
        factor, error = multiple_of(self._aggregate, before)
        return replace(found, handed_factor=factor, handed_error=torch.dot(error, error))

    def _compare_applied(self, left_out: bool) -> Applied[float | Tensor]:
        """Applied = factor * aggregate + error, of this rank's share; all of it stays on the device."""
        assert self._aggregate is not None
        if not self._applied:
            return Applied(seen=LEFT_OUT if left_out else -1.0)
        applied, _ = self._local.accumulator.take()
        total, aggregate = applied.sum(0), self._aggregate
        factor, error = multiple_of(total, aggregate)
        return Applied(1.0, factor, torch.dot(error, error), torch.dot(total, total))


def _squared(parts: list[Part], counted: frozenset[int]) -> float | Tensor:
    squares = [values.float().square().sum() for index, _, values in parts if index in counted]
    return torch.stack(squares).sum() if squares else 0.0
