"""One rank's part of a step, for every framework: from a hook's gradient to the observation that is exchanged.

    capture = StepCapture(framework, config)
    capture.moments.plan = StepPlan(1, measures=True)    # set per step, by what all ranks have agreed on
    capture.connect(moments)                             # the framework's hooks call capture.moments from now on
    observation = capture.observation(exact=False)
    capture.moments.end_step()
    capture.close(ended=True)                            # the framework is as it was

One gradient: a hook on each trainable parameter -> :meth:`StepMoments.gradient`, with what one micro-batch brings
before it is accumulated -> :class:`LocalGradient`, which adds it to a sketch -> the reduction ->
:class:`ReducedGradient`, which reads its result -> :meth:`StepCapture.observation`. A hook returns nothing (a returned
tensor would replace the gradient) and keeps no reference (that would disable buffer stealing).

Beside it: rows and losses (``forwards``, ``batch_rows``, ``loaders``), how much each label counts (``objective``), and
what every rank must set alike (``local_settings``, ``settings_check``, ``untrained``).

Whatever breaks in here breaks on one rank only: its next observation says "failed", and all ranks switch off together
(:mod:`ds_silent.distributed.guard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.batch_rows import RowIds, id_capacity
from ds_silent.capture.breaches import BreachCheck
from ds_silent.capture.forwards import Forwards
from ds_silent.capture.loader_rules import GivenRows, WorkerRows
from ds_silent.capture.loaders import LoaderWatch, Walk
from ds_silent.capture.local_gradient import LocalGradient, sample_of
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.reduced_gradient import ReducedGradient
from ds_silent.capture.settings_check import SettingsCheck
from ds_silent.capture.traced import TraceCapture
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.exchange.layout import GATHER_LIMIT, ExchangeShape
from ds_silent.exchange.observation import BROKE, Applied, Observation, Reduced, Status, Wishes
from ds_silent.framework import Framework, Moments, Promise, layers_of
from ds_silent.kernels.checksums import LayerChecksums
from ds_silent.maths.sketch import fold
from ds_silent.patches import Patches
from ds_silent.replicas.compare import ReplicaChecksum
from ds_silent.rules import rules_of


@dataclass(frozen=True)
class StepPlan:
    """What is done in one step, the same on every rank."""

    step: int  # as all ranks count it; what communicates is timed by it
    measures: bool = False  # it is measured
    exact: bool = False  # the local gradients are exchanged piece by piece, too
    sends: bool = False  # an observation is sent: of each measured step, and of the first
    traces: bool = False  # it gets a line of the trace


class StepMoments:
    """What is taken at each moment of a step, in the order of a step. An adapter calls it by ``framework.Moments``.

    Args:
        keep: keeps the local gradient, where a wrong reduction is to be repeated.
    """

    def __init__(
        self,
        framework: Framework,
        guard: CollectiveGuard,
        local: LocalGradient,
        aggregate: ReducedGradient,
        forwards: Forwards,
        settings: LocalSettings,
        keep: Callable[..., None] | None,
    ):
        self._framework, self._guard, self._local, self._settings = framework, guard, local, settings
        self.aggregate, self.forwards, self.leave, self._keep = aggregate, forwards, local.leave, keep
        self.plan = StepPlan(framework.step)  # of the step under way
        self.last_applied: Applied[float | Tensor] = Applied()  # of the last measured step
        self._start_step()

    def _start_step(self) -> None:
        self.came = False  # a gradient has come, or a reduction has begun
        self.unpublished = False  # the step gets no record, with which what is applied could be compared
        self._reducing = self._applied = self.reduction_read = False  # the last: its result was looked at
        self._settings.objective.start()
        self._framework.script_hooks.start_step()
        self.scale: Tensor | None = None  # factor on the step's gradients, as the gradient of its loss says it
        self.gram: Tensor | None = None  # this rank's part of the exact inner products

    def begins(self, stored: Callable[[], Iterable[tuple[int, Tensor]]], apart: bool = False) -> None:
        """Take out what gradients hold before a step's first micro-batch; ``apart``: hooks see the step's own alone."""
        if self.plan.measures:
            for index, values in stored():
                self._local.take_out(index, values, apart)

    def root(self, root: Any, own: bool = False) -> None:
        """A backward begins with ``root``; ``own``: it surely reaches the model."""
        if self.plan.measures:
            self._framework.script_hooks.follow()
            self._settings.objective.begins(root, own)

    def handed(self, loss: Any, promise: Promise | None, below: float = 1.0) -> None:
        """Take a loss that the script hands to a wrapper, what that promises, and what its hooks multiply below it."""
        if self.plan.measures:
            self._settings.objective.handed(loss, promise, below)

    def scaled(self, factor: float, gradient: Tensor) -> None:
        """Take the factor on the step's gradients, from the gradient of its loss."""
        self.scale = gradient.detach().float() * factor

    def gradient(self, index: int, gradient: Tensor) -> bool:
        """Observe one parameter's gradient of one micro-batch; return whether it waits for :meth:`accumulated`.

        This runs for every parameter, between operations that have emptied the caches: a function that need not be
        called costs ten times here what it costs in a loop.
        """
        if self.forwards.evaluated is not None:
            self.forwards.was_training()
        if not self.came:
            self._came()
        if self.plan.measures:
            self._settings.objective.reached = True
            boundary = self._framework.hook_sees_full_gradient and self._framework.is_boundary()
            together = self._framework.reads_together and not self._framework.is_changed_behind(index)
            return self._local.observe(index, gradient, boundary, self.plan.exact, together)
        return False

    def accumulated(self, *_: Any) -> None:
        """Observe the gradients where they have accumulated, all at once."""
        if self.plan.measures:
            self._local.observe_accumulated(self.plan.exact)

    def keep_for_retry(self, *args: Any, **kwargs: Any) -> None:
        """Keep the local gradient at the boundary, where a wrong reduction is to be repeated."""
        if self._keep is not None and self._framework.is_boundary():
            self._guard.local(self._keep, *args, **kwargs)

    def micro_batch_ended(self, boundary: bool) -> bool:
        """Observe what no hook did; return whether the exact inner products are due before the reduction."""
        self._guard.local(self.forwards.backward_ended)
        if not self.came:
            self._came()
        if not self.plan.measures:
            return False
        if boundary:
            self._reducing = True
            if not self._framework.reads_together:
                self._guard.local(self._local.observe_accumulated, self.plan.exact)
        self._guard.local(self._local.end_micro_batch)
        return boundary and self.plan.exact

    def exchange_exactly(self) -> None:
        """Exchange the local gradients before the reduction, where none is copied. A collective."""
        if not self._local.whole.copied:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the local gradients piece by piece, once per step. A collective."""
        if self._guard.collective(lambda: self.gram is None):
            self.gram = self._local.exchange(self._framework.group, self._guard)

    def reduced(self, again: bool = False) -> None:
        """Look at the reduction's result behind the boundary's backward, before scripts clip and scale it.

        Where this moment does not come, the step looks.

        Args:
            again: the reduction has ended only now, behind a backward whose result was looked at too early.
        """
        if self._reducing or (again and self.measured):
            self._reducing, self.reduction_read = False, True
            self.aggregate.reduced(self._framework.aggregated())

    def applying(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Observe what an optimizer applies; once per step, or per parameter group where a framework steps so."""
        self._applied = True
        if self._framework.observes_applied and self.measured and not self.unpublished:
            self.aggregate.apply(self._framework.applied(optimizer))

    def dropped(self) -> None:
        """Begin the step under way anew, with the forwards whose backward has not come."""
        self._guard.local(self._drop)
        self._start_step()

    def _drop(self) -> None:
        self._local.drop()
        self.forwards.drop()
        self.aggregate.start_step()

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        if self.measured:  # steps that are not measured leave it for the next observation
            self.last_applied = self._compare_applied()
        self.aggregate.start_step()
        self._local.start_step()
        self.forwards.end_step()
        self._start_step()
        self._local.micro_batches.start_step()

    def _compare_applied(self) -> Applied[float | Tensor]:
        if self.skipped or self.unpublished or not self._framework.observes_applied:
            return Applied()
        counts = self._framework.counts
        compare = self.aggregate.compare_applied
        return self._guard.local(compare, self._applied, counts.left_out, counts.partly) or Applied()

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, in search of its loss scale."""
        return self._framework.seeks_loss_scale(self._applied if self.measured else None)

    @property
    def measured(self) -> bool:
        """Whether the step under way is measured, and has begun."""
        return self.came and self.plan.measures

    def _came(self) -> None:
        """Begin the step with its first gradient, or with its reduction: look at the modes."""
        self.came = True
        if self.plan.measures:
            self._guard.local(self._settings.look_at_modes)


class StepCapture:
    """What a step is observed with, and the observation that is made of it; ``shape``: what its sizes follow from."""

    def __init__(self, framework: Framework, config: SilentConsistencyConfig, gather_limit: int = GATHER_LIMIT):
        self.framework = framework
        self.group, self.device = framework.group, framework.device
        self.guard = CollectiveGuard(self.group)
        ranks = dist.get_world_size(self.group)
        self.layer_names, layers = layers_of(list(framework.names))
        self.clip = framework.clip
        self._checksums = LayerChecksums(framework.numels, layers, self.device)
        retries = config.respond.on_aggregation_error == "retry" and config.reduction != "ordered"
        keep = framework.keep_for_again if retries else None
        checks = config.integrity.aggregation or config.trace is not None
        self._sends_aggregates = checks and config.direction.method != "off"  # by layer
        self._sends_layers = config.direction.per_layer or self._sends_aggregates
        self._local = LocalGradient(
            framework.numels,
            layers,
            config.direction,
            self.device,
            framework.accumulated,
            additive=framework.reduces_every_micro_batch,
            norms_add_up=not (framework.reduces_every_micro_batch and framework.micro_batches > 1),
            copied=framework.reduces_every_micro_batch or framework.overlaps_backward,
            by_layer=self._sends_layers,
        )
        self.kept, plan = self._local.micro_batches, self._local.accumulator.plan
        self.arithmetic = framework.arithmetic(plan.numel, plan.width)
        rows = framework.micro_batch_rows * framework.micro_batches
        capacity = id_capacity(config, rows, ranks, framework.micro_batches_told)
        self.rows = RowIds(config.coverage, capacity, framework.micro_batch_rows, ranks, self.guard.local)
        self.traced = None if config.trace is None else TraceCapture(framework, self.guard, self.rows)
        self.shape = ExchangeShape(
            ranks,
            len(self.layer_names),
            self.rows.sampling.numbers if config.coverage else 0,
            framework.micro_batches,
            framework.aggregate_replicated,
            gather_limit,
            0 if self.traced is None else self.traced.samples.count,
        )
        self.loaders = LoaderWatch(ranks)
        in_norm = framework.peers.in_norm if framework.peers else None
        aggregate = ReducedGradient(self._local, in_norm, config.integrity.reread)
        self.settings = LocalSettings(framework.module, framework.optimizers, framework)
        self.settings_check = SettingsCheck(self.settings, framework, self.guard)
        given, rules = GivenRows(self.loaders, lambda: framework.step), rules_of(framework, config)
        rules = rules and [self.settings.objective.places, WorkerRows(lambda: framework.step), given, *rules]
        self.breach_check = BreachCheck(rules, framework, self.guard)
        forwards = Forwards(framework, self.guard.local, self.rows, self.loaders, self.settings, self.traced)
        self.moments = StepMoments(framework, self.guard, self._local, aggregate, forwards, self.settings, keep)
        self.rows.is_measured = lambda: self.moments.plan.measures
        self.rows.are_others, self.rows.is_left_out = given.forward, lambda: framework.counts.left_out
        self._patches = Patches()
        self._before: Observation | None = None  # of the step's reduction

    def connect(self, moments: Moments) -> None:
        """Put the framework's hooks in place."""
        self._patches.add(self.loaders.connect())
        self.settings.autocast.connect(self._patches, self.guard.local)
        self.breach_check.connect(self._patches)  # first: who closes in a framework's hook takes no later hook away
        self.framework.connect(moments)

    def close(self, ended: bool) -> None:
        """Remove every hook; ``ended``: for good, and not because it broke."""
        self.framework.close(ended=ended)  # its hooks came last, and may lie around the same functions
        self._patches.undo()
        self._local.whole.close()

    # -- what the observer reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""
        return self.framework.step

    @property
    def walk(self) -> Walk:
        """How the rows of the newest observation came to this rank."""
        rows, facts, seen, deal = self.rows, self.loaders.facts, self.loaders.seen, self.loaders.deal
        return Walk(facts, rows.starts, seen, rows.told, deal, rows.repeated, rows.batch_again, rows.given_rows)

    # -- the observation -----------------------------------------------------------------------------------------

    def observation(self, exact: bool, replica: ReplicaChecksum | None = None) -> Observation:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
            replica: checksum of this rank's replica, or of its parameters, where it is due.
        """
        if (gram := self.framework.gram()) is not None:
            self.moments.gram = gram
        if exact:
            self.moments.exchange()
        return self._guarded(lambda: self._observed(replica))

    def said(self, status: Status[float | Tensor], wishes: Wishes[float | Tensor]) -> None:
        """Take what this rank says in the step's observation beside what it has seen: it says so again."""
        self._before = self._before and replace(self._before, status=status, wishes=wishes)

    def observation_again(self) -> Observation:
        """The same observation with what a repeated reduction has brought, without the replica's checksum."""
        return self._guarded(self._observed_again)

    def _guarded(self, observe: Callable[[], Observation]) -> Observation:
        return self.guard.local(observe) or Observation(Status(failed=BROKE))

    def _observed(self, replica: ReplicaChecksum | None) -> Observation:
        moments, local = self.moments, self._local
        scale, hashes = self.framework.scale(moments.scale), self._hashes(None if replica is None else replica.value)
        code = replace(self.settings.code(self.step), breaches=self.breach_check.code(self.step))
        objective, loss = self.settings.objective.numbers(), moments.forwards.observed(scale)
        sketches, squares = moments.aggregate.take_local()
        traced = {} if self.traced is None else self.traced.observed(moments.plan.traces)
        self._before = Observation(
            loss=loss,
            local=replace(local.observed(squares.sum(), moments.gram), **self.framework.script_hooks.observed()),
            reduced=Reduced(replica_seen=0.0 if replica is None else replica.seen),
            applied=moments.last_applied,
            code=code,
            objective=objective,
            sketch=sketches.sum(0) if local.sketching else None,
            layer_squares=squares,
            ids=None if moments.unpublished else self.rows.take(squares.device),  # they wait for the next
            layer_sketches=sketches if self._sends_layers and local.sketching else None,
            gram=moments.gram,
            **traced,
        )
        return self._with_aggregate(self._before, hashes)

    def _observed_again(self) -> Observation:
        assert self._before is not None
        before = replace(self._before, reduced=Reduced())
        return self._with_aggregate(before, self._hashes(None), again=True)

    def _with_aggregate(self, before: Observation, hashes: Tensor, again: bool = False) -> Observation:
        reduced, sketch, sketches = self.moments.aggregate.observed(self.framework.aggregated(), again)
        return replace(
            before,
            reduced=replace(reduced, replica_seen=before.reduced.replica_seen),
            aggregate=sketch,
            layer_aggregates=sketches if self._sends_aggregates else None,
            hashes=hashes,
        )

    def _hashes(self, replica: Tensor | None) -> Tensor:
        """int64 (1 + L,) or (1,): the replica's checksum and, where every rank holds the aggregate, its layers'."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device) if replica is None else replica.reshape(1)
        if not self.shape.aggregate_replicated:
            return first
        aggregate = [self.framework.reduced(index) for index in range(len(self.framework.numels))]
        return torch.cat((first, self._checksums(aggregate)))

    def gradient_sample(self, stride: int) -> Tensor:
        """fp32 (2,) on the host: sum of squares and number of every ``stride``-th element of the aggregate."""
        return sample_of(map(self.framework.reduced, range(len(self.framework.numels))), stride, self.device)

    def take_micro_batches(self, layer_size: int) -> Tensor:
        """(A, L, layer_size) fp32 sketches of this step's micro-batches, which are not kept any more.

        Zeros where something broke here, or where there were more or fewer than configured.
        """
        count = self.shape.micro_batches
        stacked, self.kept.keeping = self.guard.local(self.kept.stack, count), False
        self.kept.drop()
        if stacked is None:
            return torch.zeros(count, len(self.layer_names), layer_size, device=self.device)
        return fold(stacked, layer_size)
