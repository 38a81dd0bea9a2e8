"""One rank's part of a step, for every framework: what its hooks bring, and the observation made of it.

    capture = StepCapture(framework, config)
    capture.moments.plan = StepPlan(1, measures=True)    # set per step, by what all ranks have agreed on
    capture.connect(moments)                             # the framework's hooks call capture.moments from now on
    observation = capture.observation(exact=False)
    capture.moments.end_step()
    capture.close(ended=True)                            # the framework is as it was

Whatever breaks in here breaks on one rank only: its next observation says "failed", and all ranks switch off together
(:mod:`ds_silent.distributed.together`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.batch_rows import LoaderWatch, RowIds, id_capacity
from ds_silent.capture.data_facts import Walk
from ds_silent.capture.forwards import Forwards
from ds_silent.capture.local_gradient import LocalGradient, sample_of
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.moments import StepMoments
from ds_silent.capture.reduced_gradient import ReducedGradient
from ds_silent.capture.settings_check import SettingsCheck
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.together import Together
from ds_silent.exchange.layout import GATHER_LIMIT, ExchangeShape
from ds_silent.exchange.observation import BROKE, Observation, Reduced, Status
from ds_silent.framework import Framework, Moments, layers_of
from ds_silent.kernels.checksums import LayerChecksums
from ds_silent.maths.sketch import fold
from ds_silent.patches import Patches


class StepCapture:
    """See the module docstring.

    Attributes:
        together: the rule of every line that runs in a step.
        layer_names: of the layers that parameters are grouped by.
        arithmetic: of the reduction.
        shape: what the sizes of an observation follow from.
        settings: what this rank's code does.
        settings_check: its comparison with the others.
        rows: this rank's ids.
        kept: sketches of single micro-batches, where they are asked for.
        loaders: what feeds the training.
        moments: what is taken at each.
    """

    def __init__(self, framework: Framework, config: SilentConsistencyConfig, gather_limit: int = GATHER_LIMIT):
        self.framework = framework
        self.group, self.device = framework.group, framework.device
        self.together = Together(self.group)
        ranks = dist.get_world_size(self.group)
        self.layer_names, layers = layers_of(list(framework.names))
        self.clip = framework.clip
        self._checksums = LayerChecksums(framework.numels, layers, self.device)
        keep = None
        if config.respond.on_aggregation_error == "retry" and config.reduction != "ordered":
            keep = framework.keep_for_again
        self._sends_aggregates = config.integrity.aggregation and config.direction.method != "off"  # by layer
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
        self.kept = self._local.micro_batches
        plan = self._local.accumulator.plan
        self.arithmetic = framework.arithmetic(plan.numel, plan.width)
        capacity = id_capacity(config, framework.micro_batch_rows * framework.micro_batches)
        self.rows = RowIds(config.coverage, capacity, framework.micro_batch_rows, ranks)
        self.shape = ExchangeShape(
            ranks,
            len(self.layer_names),
            self.rows.sampling.numbers if config.coverage else 0,
            framework.micro_batches,
            framework.aggregate_replicated,
            gather_limit,
        )
        self.loaders = LoaderWatch(ranks)
        aggregate = ReducedGradient(self._local, framework.peers.in_norm if framework.peers else None)
        self.settings = LocalSettings(framework.module, framework.optimizers, framework)
        self.settings_check = SettingsCheck(self.settings, framework.words)
        forwards = Forwards(framework.module, self.rows, self.loaders, self.settings)
        parts = (self._local, aggregate, forwards, self.settings)
        self.moments = StepMoments(framework, self.together, *parts, keep)
        self._patches = Patches()
        self._before: Observation | None = None  # of the step's reduction

    def connect(self, moments: Moments) -> None:
        """Put the framework's hooks in place."""
        self._patches.add(self.loaders.connect())
        self.settings.autocast.connect(self._patches, self.together.alone)
        self.framework.connect(moments)

    def close(self, ended: bool) -> None:
        """Remove every hook; ``ended``: for good, and not because it broke."""
        self._patches.undo()
        self.framework.close(ended=ended)
        self._local.close()

    # -- what the observer reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""
        return self.framework.step

    @property
    def walk(self) -> Walk:
        """How the rows of the newest observation came to this rank."""
        loaders = self.loaders
        return Walk(loaders.facts, self.rows.starts, loaders.seen, self.rows.told, loaders.deal)

    # -- the observation -----------------------------------------------------------------------------------------

    def observation(self, exact: bool, replica: Tensor | None = None) -> Observation:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
            replica: int64 (), checksum of this rank's replica, where it is due.
        """
        gram = self.framework.gram()
        if gram is not None:
            self.moments.gram = gram
        if exact:
            self.moments.exchange()
        return self._guarded(lambda: self._observed(replica))

    def observation_again(self) -> Observation:
        """The same observation with what a repeated reduction has brought, without the replica's checksum."""
        return self._guarded(self._observed_again)

    def _guarded(self, observe: Callable[[], Observation]) -> Observation:
        return self.together.alone(observe) or Observation(Status(failed=BROKE))

    def _observed(self, replica: Tensor | None) -> Observation:
        moments, local = self.moments, self._local
        scale, hashes = self.framework.scale(moments.scale), self._hashes(replica)
        code, objective = self.settings.code(self.step), self.settings.objective.numbers()
        loss = moments.forwards.observed(scale)
        sketches, squares = moments.aggregate.take_local()
        self._before = Observation(
            loss=loss,
            local=local.observed(squares.sum(), moments.gram),
            reduced=Reduced(replica_seen=float(replica is not None)),
            applied=moments.last_applied,
            code=code,
            objective=objective,
            sketch=sketches.sum(0) if local.sketching else None,
            layer_squares=squares,
            ids=self.rows.take(squares.device),
            layer_sketches=sketches if self._sends_layers and local.sketching else None,
            gram=moments.gram,
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
        stacked, self.kept.keeping = self.together.alone(self.kept.stack, count), False
        self.kept.drop()
        if stacked is None:
            return torch.zeros(count, len(self.layer_names), layer_size, device=self.device)
        return fold(stacked, layer_size)
