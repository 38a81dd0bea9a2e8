"""One rank's part of a step, for every framework: what comes at each moment, and the observation made of it.

    capture = StepCapture(framework, config)
    capture.connect(steps, observer)     # the framework's hooks call capture.moments from now on
    observation = capture.observation(exact=False)
    capture.end_step()
    capture.close()                      # the framework is as it was

The local gradient comes from hooks on each trainable parameter, called with the gradient of one micro-batch before it
is accumulated. They return nothing (a returned tensor would replace the gradient) and keep no reference (that would
disable buffer stealing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.batch_rows import LoaderWatch, RowIds, id_capacity
from ds_silent.capture.collector import Known, Listener, Owner, Sends, StepCollector
from ds_silent.capture.data_facts import Walk
from ds_silent.capture.local_gradient import LocalGradient, loss_in, sample_of
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.mean_loss import mean_of, times_its_share
from ds_silent.capture.settings_check import SettingsCheck
from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.together import Together
from ds_silent.exchange.layout import GATHER_LIMIT, ExchangeShape
from ds_silent.exchange.observation import Code, Objective, Observation
from ds_silent.exchange.row_ids import Sampling
from ds_silent.framework import Covers, Framework, HasPeers, LeavesOut, Moments, Part, Repeats, layers_of
from ds_silent.kernels.checksums import LayerChecksums
from ds_silent.maths.sketch import fold
from ds_silent.patches import Patches


class Keeping(Enum):
    """Whether a step's micro-batches are sketched one by one."""

    NOT_ASKED = "not asked"
    ASKED = "asked"  # from the next step on: the one under way has had its micro-batches
    KEPT = "kept"


class StepCapture:
    """See the module docstring.

    Attributes:
        together: the rule of every line that runs in a step.
        layer_names: of the layers that parameters are grouped by.
        arithmetic: of the reduction.
        shape: what the sizes of an observation follow from.
        settings: what this rank's code does.
        settings_check: its comparison with the others.
        moments: what the framework calls.
        loaders: what feeds the training.
    """

    def __init__(self, framework: Framework, config: SilentConsistencyConfig, gather_limit: int = GATHER_LIMIT):
        self.framework = framework
        self.group, self.device = framework.ranks.reduced, framework.ranks.device
        self.together = Together(self.group)
        ranks = dist.get_world_size(self.group)
        self.layer_names, layers = layers_of(list(framework.names))
        self.micro_batches, self._whole_at_hook = framework.micro_batches, framework.whole_at_hook
        self.clip = framework.clip
        self._checksums = LayerChecksums(framework.numels, layers, self.device)
        self._keeping = Keeping.NOT_ASKED
        self._keep: Callable[..., None] | None = None  # the local gradient, for a reduction that is repeated
        if config.respond.on_aggregation_error == "retry" and config.reduction != "ordered":
            assert isinstance(framework, Repeats)  # others are refused
            self._keep = framework.keep_for_again
        checks = config.integrity.aggregation and config.direction.method != "off"
        by_layer = config.direction.per_layer or checks
        self._local = LocalGradient(
            framework.numels,
            layers,
            config.direction,
            self.device,
            framework.accumulated,
            additive=framework.additive,
            norms_add_up=not (framework.additive and framework.micro_batches > 1),
            copied=framework.additive or framework.overlapped,
            by_layer=by_layer,
        )
        plan = self._local.accumulator.plan
        self.arithmetic = framework.arithmetic(plan.numel, plan.width)
        capacity = id_capacity(config, framework.micro_batch_rows * framework.micro_batches)
        self._rows = RowIds(config.coverage, capacity, framework.micro_batch_rows, ranks)
        ids = self._rows.sampling.numbers if config.coverage else 0
        self.shape = ExchangeShape(
            ranks, len(self.layer_names), ids, self.micro_batches, framework.aggregate_replicated, gather_limit
        )
        self.loaders = LoaderWatch(ranks)
        counted = framework.in_norm if isinstance(framework, HasPeers) else None
        sends = Sends(by_layer, checks, framework.observes_applied, counted)
        self._collector = StepCollector(self._local, self._rows, sends, self.together)
        covers = framework if isinstance(framework, Covers) else None
        self.settings = LocalSettings(framework.module, framework.optimizers, covers)
        self.settings_check = SettingsCheck(self.settings, framework.words)
        self._evaluated: Callable[[], None] | None = None  # a forward in evaluation mode, which may be a training's
        self._evaluated_loss: Tensor | None = None
        self._times_share: Tensor | None = None  # of the forward under way, where its loss is a share of the step's
        self._listener: Listener | None = None
        self._owner: Owner | None = None
        self._patches = Patches()
        self._start_step()

    def _start_step(self) -> None:
        self._measuring: bool | None = None  # decided at the step's first gradient, from rank-agreed state
        self._exact = False
        self._reducing = self._applied = False
        self.settings.objective.start()
        self._scale: Tensor | None = None
        self._gram: Tensor | None = None

    # -- what the observer reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""
        return self.framework.step

    @property
    def came(self) -> bool:
        """Whether a gradient has come, or a reduction has begun, since the last step."""
        return self._measuring is not None

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks so far."""
        return self.framework.samples

    @property
    def batch(self) -> float:
        """Rows per rank and optimizer step."""
        return self.framework.batch

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, in search of its loss scale."""
        return self.framework.skipped(self._applied if self._measuring else None)

    @property
    def update_skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, whatever the reason."""
        return self.framework.update_skipped

    @property
    def rows_waiting(self) -> bool:
        """Whether ids of earlier steps wait for the next observation."""
        return self._rows.waiting

    @property
    def sampling(self) -> Sampling:
        """Of which rows the ids are sent."""
        return self._rows.sampling

    @property
    def walk(self) -> Walk:
        """How the rows of the newest observation came to this rank."""
        loaders = self.loaders
        return Walk(loaders.facts, self._rows.starts, loaders.seen, self._rows.told, loaders.deal)

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Ids of the rows of this rank's next micro-batch."""
        self._rows.given(sample_ids)

    def observation(self, exact: bool, replica: Tensor | None = None) -> Observation:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
            replica: int64 (), checksum of this rank's replica, where it is due.
        """
        made = self.framework.gram()
        if made is not None:
            self._gram = made
        if exact and self.together.once(lambda: self._gram is None):
            self._gram = self._local.exchange(self.group, self.together)
        scale = self.together.alone(self.framework.scale, self._scale)
        hashes = self.together.alone(self._hashes, replica)
        code = self.together.alone(self.settings.code, self.step) or Code()
        due, objective = (
            float(replica is not None),
            self.together.alone(self.settings.objective.numbers) or Objective(),
        )
        order, unscaled = self.loaders.deal.word, 1.0 if scale is None else scale
        known = Known(unscaled, self._gram, code, objective, due, order)
        return self._collector.observation(self._aggregated(), known, hashes)

    def _aggregated(self) -> Iterator[Part] | None:
        return self.together.alone(self.framework.aggregated)

    def observation_again(self) -> Observation:
        """The same observation with what a repeated reduction has brought."""
        return self._collector.observation_again(self._aggregated(), self.together.alone(self._hashes, None))

    def gradient_sample(self, stride: int) -> Tensor:
        """fp32 (2,) on the host: sum of squares and number of every ``stride``-th element of the aggregate."""
        return sample_of(map(self.framework.reduced, range(len(self.framework.numels))), stride, self.device)

    def keep_micro_batches(self) -> None:
        """Keep a sketch of each micro-batch of the next measured step; every rank calls it at the same step."""
        if self._keeping is Keeping.NOT_ASKED:
            self._keeping = Keeping.ASKED

    @property
    def keeps_micro_batches(self) -> bool:
        """Whether they were kept in this step; the same on every rank."""
        return self._keeping is Keeping.KEPT

    def take_micro_batches(self, layer_size: int) -> Tensor:
        """(A, L, layer_size) fp32 sketches of this step's micro-batches.

        Zeros where something broke here, or where there were more or fewer than configured.
        """
        self._keeping = Keeping.NOT_ASKED
        kept = self.together.alone(self._local.take_micro_batches) or []
        if len(kept) != self.micro_batches:
            return torch.zeros(self.micro_batches, len(self.layer_names), layer_size, device=self.device)
        return fold(torch.stack(kept), layer_size)

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        left_out = isinstance(self.framework, LeavesOut) and self.framework.left_out
        self._collector.end_step(observed=bool(self._measuring) and not self.skipped, left_out=left_out)
        self._evaluated = self._evaluated_loss = None
        self._start_step()
        if self._keeping is Keeping.ASKED:
            self._keeping = Keeping.KEPT
            self.together.alone(self._local.keep_micro_batches)

    # -- connecting and disconnecting ---------------------------------------------------------------------------

    def connect(self, listener: Listener, owner: Owner) -> None:
        """Every moment is one of three, see :mod:`ds_silent.distributed.together`: alone, tried, or played."""
        self._listener, self._owner = listener, owner
        self._patches.add(self.loaders.connect())
        alone, tried, play = self.together.alone, self.together.tried, self.together.play
        self.settings.autocast.connect(self._patches, alone)
        self.framework.connect(
            Moments(
                together=self.together,
                begins=partial(alone, self._begins),
                forward=partial(alone, self._forward),
                forwarded=partial(alone, self._forwarded),
                loss=partial(alone, self._collector.loss),
                share=partial(alone, self._collector.share),
                root=partial(alone, self.settings.objective.begins, lambda: listener.measures(listener.scheduled)),
                scaled=partial(alone, self._scaled),
                gradient=partial(alone, self._gradient),
                micro_batch_ended=partial(play, self._micro_batch_ended),
                before_reduction=partial(play, self._before_reduction),
                reduced=partial(alone, self._reduced),
                applying=partial(alone, self._applying),
                before_update=partial(play, self._before_update),
                dropped=partial(play, self._dropped),
                updated=partial(play, listener.after_step),
                before_checkpoint=partial(tried, self._before_checkpoint),
                ends=partial(tried, self._ends),
            )
        )

    def close(self) -> None:
        """Remove every hook."""
        self._patches.undo()
        self.framework.close(ended=self._owner is None or self._owner.closed)
        self._local.close()

    # -- the moments --------------------------------------------------------------------------------------------

    def _begins(self, held: Callable[[], Iterable[tuple[int, Tensor]]]) -> None:
        """Where nobody sees each micro-batch's gradient: what is there before the first is none of this step's."""
        assert self._listener is not None
        if self._listener.measures(self._listener.scheduled):
            for index, values in held():
                self._local.take_out(index, values)

    def _forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """The micro-batch's rows, by content where the script does not tell their ids, and its label tokens.

        In evaluation mode nobody knows yet: an evaluation, or a training that forgot to call ``train()``. The newest
        forward is kept until a gradient comes.
        """
        if not torch.is_grad_enabled():
            return
        self._times_share = times_its_share(self.framework.module, kwargs)
        if self.framework.module.training:  # a wrapper's own flag stays when its module is told to evaluate
            self._evaluated = self._evaluated_loss = None
            self.settings.before_forward()
            self._rows.forward(args, kwargs, self.loaders.forward())
        else:
            self._evaluated = lambda: self._rows.forward(args, kwargs, self.loaders.forward())

    def _forwarded(self, module: Any, inputs: Any, output: Any) -> None:
        """Torch-style ``loss.backward()`` gives nobody the loss: then the forward's loss is the loss."""
        if not torch.is_grad_enabled():
            return
        loss = loss_in(output)
        if loss is not None:
            loss = mean_of(loss, self._times_share)
        if self.framework.module.training:
            self.settings.after_forward()
            if loss is not None:
                self._collector.forward_loss(loss)
        else:
            self._evaluated_loss = loss

    def _train_in_evaluation_mode(self, forward: Callable[[], None]) -> None:
        """The forward that was kept was a training's after all."""
        forward()
        if self._evaluated_loss is not None:
            self._collector.late_forward_loss(self._evaluated_loss)
        self._evaluated = self._evaluated_loss = None

    def _scaled(self, factor: float, gradient: Tensor) -> None:
        self._scale = gradient.detach().float() * factor

    def _gradient(self, index: int, gradient: Tensor) -> None:
        if self._evaluated is not None:
            self._train_in_evaluation_mode(self._evaluated)
        if self._measures():
            self.settings.objective.reached = True
            self._local.observe(index, gradient, self._whole_at_hook and self.framework.is_boundary(), self._exact)

    def _before_reduction(self, *args: Any, **kwargs: Any) -> None:
        """Called at the end of every backward; at the boundary, before the reduction (where overlapped: while)."""
        if self._keep is not None and self.framework.is_boundary():
            self.together.alone(self._keep, *args, **kwargs)
        if self._micro_batch_ended() and not self._local.copied and self.together.once(lambda: self._gram is None):
            self._gram = self._local.exchange(self.group, self.together)

    def _micro_batch_ended(self) -> bool:
        """A micro-batch's gradients are all there; whether the inner products are due before the reduction."""
        boundary = self.framework.is_boundary()
        if boundary and self._listener is not None:
            self._listener.before_reduction()
        self.together.alone(self._collector.backward_ended)
        if not self._measures():
            return False
        if boundary:
            self._reducing = True
            self.together.alone(self._local.observe_silent, self._exact)
        self.together.alone(self._local.end_micro_batch)
        return boundary and self._exact

    def _reduced(self, again: bool = False) -> None:
        """Behind the boundary's backward the result is still what the reduction made of it.

        From then on until the step, scripts clip and scale. Where this moment does not come, the step looks.

        Args:
            again: the reduction has ended only now, behind a backward whose result was looked at too early.
        """
        if self._reducing or (again and self._measuring):
            self._reducing = False
            self._collector.reduced(self._aggregated())

    def _applying(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Once per step, or once per parameter group where a framework steps so."""
        self._applied = True
        if self.framework.observes_applied and self._measuring:
            self._collector.apply(self.framework.applied(optimizer))

    def _before_update(self, *args: Any, **kwargs: Any) -> None:
        assert self._listener is not None
        self._listener.before_step()

    def _dropped(self) -> None:
        """The step under way begins anew, with the forwards whose backward has not come."""
        assert self._listener is not None
        self.together.alone(self._collector.drop)
        self._start_step()
        self._listener.dropped()

    def _before_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._owner is not None:
            self._owner.before_checkpoint()

    def _ends(self, *args: Any, **kwargs: Any) -> None:
        if self._owner is not None:
            self._owner.close()

    def _measures(self) -> bool:
        if self._measuring is None:
            assert self._listener is not None
            step, listener = self._listener.scheduled, self._listener
            measuring = listener.measures(step)
            # in one statement: whether the ranks exchange exactly must never be half decided
            self._measuring, self._exact = measuring, measuring and listener.measures_exactly(step)
            if measuring:
                self.together.alone(self.settings.look_at_modes)
        return self._measuring

    def _hashes(self, replica: Tensor | None) -> Tensor:
        """int64 (1 + L,) or (1,): the replica's checksum and, where every rank holds the aggregate, its layers'."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device) if replica is None else replica.reshape(1)
        if not self.shape.aggregate_replicated:
            return first
        held = [self.framework.reduced(index) for index in range(len(self.framework.numels))]
        return torch.cat((first, self._checksums(held)))
