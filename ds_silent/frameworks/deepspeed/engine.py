"""One DeepSpeed engine's gradients, seen from leaf hooks.

    capture = DeepSpeedCapture(engine, config)
    capture.connect(listener)            # hooks and wrappers on this engine instance only
    sample = capture.sample(exact=False)
    capture.close()                      # the engine is as it was

The local gradient comes from ``torch.Tensor.register_hook`` on each trainable parameter: a leaf pre-hook, called with
the gradient of one micro-batch before it is accumulated and before DeepSpeed's own hooks. It returns None (a returned
tensor would replace the gradient) and keeps no reference (that would disable buffer stealing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.capture.conduct import Conduct
from ds_silent.capture.data_facts import Walk
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.capture.local_gradient import LocalGradient, layers_of, loss_in
from ds_silent.capture.observation import Part, Sends, StepSampler
from ds_silent.capture.row_ids import RowIds, id_capacity
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.exchange.gather import LocalSample
from ds_silent.exchange.row_ids import packed_size
from ds_silent.frameworks.base import Listener
from ds_silent.frameworks.deepspeed.applied import applied_gradients, applied_places, base_optimizers
from ds_silent.frameworks.deepspeed.arithmetic import arithmetic_of, scales_loss
from ds_silent.frameworks.deepspeed.gradients import (
    accumulated_gradients,
    aggregated_gradients,
    numel_of,
    reduced_after_backward,
    share_of,
    whole_on_every_rank,
)
from ds_silent.frameworks.deepspeed.groups import data_parallel_group, own_group
from ds_silent.frameworks.deepspeed.kept_gradients import KeptGradients
from ds_silent.frameworks.deepspeed.ordered import OrderedReduction
from ds_silent.frameworks.deepspeed.replicated import replica_of, replicated_parameters, replicated_state
from ds_silent.frameworks.patches import Patches
from ds_silent.maths.sketch import fold
from ds_silent.ranks.together import Together
from ds_silent.replicas.checksums import Items, LayerChecksums, Replica


class DeepSpeedCapture:
    """Captures one engine's local, aggregated and applied gradients; see the module docstring."""

    def __init__(self, engine: Any, config: SilentConsistencyConfig):
        self._engine = engine
        training_group = data_parallel_group(engine)
        assert training_group is not None  # of an engine
        self.group: dist.ProcessGroup = own_group(training_group)
        self.device: torch.device = torch.device(engine.device)
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self.layer_names, layers = layers_of([name for name, _ in named])
        numels = [numel_of(p) for p in self._parameters]
        self._checksums = LayerChecksums(numels, layers, self.device)

        # Stages 2 and 3 reduce and free every micro-batch; with overlap, stage 1 reduces during the last backward.
        additive = bool(engine.zero_optimization_partition_gradients())
        overlapped = bool(engine.zero_overlap_comm()) and engine.zero_optimization_stage() > 0
        steps = int(engine.gradient_accumulation_steps())
        self.micro_batches = steps
        self._keeping: bool | None = None  # micro-batches: True in a step where they are kept, None when nobody asked
        self._held = accumulated_gradients(engine, self._parameters)
        self.together = Together(self.group)
        self._kept: KeptGradients | None = None
        ordered = config.reduction == "ordered"
        self._ordered: OrderedReduction | None = None
        if config.respond.on_aggregation_error == "retry" and not ordered:
            self._kept = KeptGradients(engine, self._parameters)
        self._reduce: Callable[[], Any] | None = None  # the step's reduction, to be called again
        checks = config.integrity.aggregation and config.direction.method != "off"
        self._local = LocalGradient(
            numels,
            layers,
            config.direction,
            self.device,
            self._held_locally,
            additive=additive,
            norms_add_up=not (additive and steps > 1),
            copied=additive or overlapped,
            by_layer=config.direction.per_layer or checks,
        )
        plan = self._local.accumulator.plan
        ranks = dist.get_world_size(self.group)
        self.arithmetic = arithmetic_of(engine, plan.numel, plan.width, steps if additive else 1, ranks, ordered)
        self._share = share_of(
            engine, self._parameters, self._local.offsets, self._local.total, dist.get_rank(self.group), ranks
        )
        if ordered:
            self._ordered = OrderedReduction(engine, self._parameters, self._share, config, training_group)
        self._early = reduced_after_backward(engine)
        self._autocast_scales = getattr(engine, "torch_autocast_z0_gradscaler", None) is not None
        self._places = applied_places(engine, self._parameters, self._share) if checks else None
        self.aggregate_replicated = checks and self._share is not None and whole_on_every_rank(engine)
        self.clip: float = float(engine.gradient_clipping())

        capacity = id_capacity(config, self.rows_per_step)
        self.id_size = packed_size(capacity) if config.coverage else 0
        micro_batch = int(engine.train_micro_batch_size_per_gpu())
        self._rows = RowIds(enabled=config.coverage, capacity=capacity, micro_batch=micro_batch)
        self._loaders = LoaderWatch(ranks)
        sends = Sends(config.direction.per_layer or checks, checks, applied=self._places is not None)
        self._sampler = StepSampler(self._local, self._rows, sends, self.together)
        self.conduct = Conduct(engine.module, lambda: base_optimizers(engine))
        self._evaluated: Callable[[], None] | None = None  # a forward in evaluation mode, which may be a training's
        self._evaluated_loss: Tensor | None = None
        self._scales_loss = scales_loss(engine)
        self._listener: Listener | None = None
        self._patches = Patches()
        self._start_step()

    def _start_step(self) -> None:
        self._measuring: bool | None = None  # decided at the step's first gradient, from rank-agreed state
        self._exact = False
        self._reducing = self._stepped = False
        self._loss_scale: Tensor | None = None
        self._gram: Tensor | None = None

    # -- what the observer reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1 (``engine.global_steps`` counts finished ones, skipped ones too)."""
        return int(self._engine.global_steps) + 1

    @property
    def came(self) -> bool:
        return self._measuring is not None

    @property
    def samples(self) -> int:
        return int(self._engine.global_samples)

    @property
    def batch(self) -> float:
        return float(self._engine.train_batch_size()) / dist.get_world_size(self.group)

    @property
    def rows_per_step(self) -> int:
        """Rows per rank and optimizer step, as configured; the same on every rank."""
        return int(self._engine.train_micro_batch_size_per_gpu()) * int(self._engine.gradient_accumulation_steps())

    @property
    def skipped(self) -> bool:
        """Whether the loss scale made DeepSpeed skip the step just taken (``engine.was_step_applied()``, 0.12 to 0.19).

        ZeRO skips steps with an overflow in fp32 and bf16 too; there it is a fault, not a search for the loss scale.
        In stage 0 autocast's scaler leaves the optimizer out without telling the engine.
        """
        if self._autocast_scales and self._measuring:
            return not self._stepped
        return self._scales_loss and self.update_skipped

    @property
    def update_skipped(self) -> bool:
        """Whether DeepSpeed did not apply the step just taken, whatever the dtype (``engine.was_step_applied()``)."""
        return not self._engine.was_step_applied()

    @property
    def rows_waiting(self) -> bool:
        return self._rows.waiting

    @property
    def walk(self) -> Walk:
        return Walk(self._loaders.facts, self._rows.starts, self._loaders.seen, self._rows.told)

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Parameters that every rank holds whole, and a function that names all else that is replicated."""
        return replicated_parameters(self._engine), lambda: replicated_state(self._engine)

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Ids of the rows of this rank's next micro-batch."""
        self._rows.given(sample_ids)

    def sample(self, exact: bool, replica: Tensor | None = None) -> LocalSample:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
            replica: int64 (), checksum of this rank's replica, where it is due.
        """
        if self._ordered is not None:
            self._gram = self._ordered.gram
        if exact and self.together.once(lambda: self._gram is None):
            self._gram = self._local.exchange(self.group, self.together)
        scale = self.together.alone(self._scale)
        hashes = self.together.alone(self._hashes, replica)
        sample = self._sampler.sample(self._aggregated(), 1.0 if scale is None else scale, self._gram, hashes)
        if replica is not None:
            sample.scalars["replica_seen"] = 1.0
        sample.scalars.update(self.together.alone(self.conduct.scalars, self.step) or {})
        return sample

    def _aggregated(self) -> Iterator[Part] | None:
        return self.together.alone(aggregated_gradients, self._engine, self._parameters, self._share)

    # -- for responses -----------------------------------------------------------------------------------------

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """What makes one replica in stage 0; its tensors may be written between two steps."""
        return replica_of(self._engine, optimizer_state, buffers)

    def reduce_again(self) -> int:
        """Repeat the step's reduction from the local gradients that were kept. A collective.

        Returns:
            bytes of the gradients that were reduced.
        """
        if self._ordered is not None:
            self._ordered.reduce()
            return self._ordered.local_bytes
        assert self._kept is not None
        assert self._reduce is not None
        self._kept.put_back()
        reduce = getattr(self._engine.optimizer, "reduce_gradients", None)
        if reduce is None or self._kept.in_place:
            self._reduce()
        else:  # stages 1 and 2 have given their buckets back: what pipelines call makes them anew (0.16.9 to 0.19.8)
            reduce(pipeline_parallel=True)
        return self._kept.bytes

    def sample_again(self) -> LocalSample:
        """The same observation with what the repeated reduction has brought."""
        return self._sampler.sample_again(self._aggregated(), self.together.alone(self._hashes, None))

    def gradient_sample(self, stride: int) -> Tensor:
        """fp32 (2,) on the host: sum of squares and number of every ``stride``-th element of the aggregate."""
        total = torch.zeros(2, device=self.device)
        for index in range(len(self._parameters)):
            held = self._held(index)
            if held is not None:
                part = held.detach().reshape(-1)[::stride].float()
                total += torch.stack((part.square().sum(), part.new_tensor(float(part.numel()))))
        return total.cpu()

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        """DeepSpeed's own checkpoint. A collective."""
        self._engine.save_checkpoint(directory, tag=tag, client_state=client_state)

    def keep_micro_batches(self) -> None:
        """Keep a sketch of each micro-batch of the next measured step; every rank calls it at the same step."""
        if self._keeping is None:
            self._keeping = False  # the step under way has had its micro-batches

    @property
    def keeps_micro_batches(self) -> bool:
        return bool(self._keeping)

    def take_micro_batches(self, layer_size: int) -> Tensor:
        """(A, L, layer_size) fp32 sketches of this step's micro-batches.

        Zeros where something broke here, or where there were more or fewer than configured.
        """
        self._keeping = None
        kept = self.together.alone(self._local.take_micro_batches) or []
        if len(kept) != self.micro_batches:
            return torch.zeros(self.micro_batches, len(self.layer_names), layer_size, device=self.device)
        return fold(torch.stack(kept), layer_size)

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        self._sampler.end_step(observed=bool(self._measuring) and not self.skipped)
        self._evaluated = self._evaluated_loss = None
        self._start_step()
        if self._keeping is False:
            self._keeping = True
            self.together.alone(self._local.keep_micro_batches)

    # -- connecting and disconnecting ---------------------------------------------------------------------------

    def connect(self, listener: Listener) -> None:
        """Every entry is one of three, see :mod:`ds_silent.ranks.together`: alone, tried, or played."""
        self._listener = listener
        engine, alone, tried, play = self._engine, self.together.alone, self.together.tried, self.together.play
        if self._rows.enabled:
            self._patches.add(self._loaders.connect())
        for index, parameter in enumerate(self._parameters):
            self._patches.add(parameter.register_hook(partial(alone, self._gradient, index)))
        self._patches.add(engine.register_forward_pre_hook(partial(alone, self._before_forward), with_kwargs=True))
        self._patches.add(engine.register_forward_hook(partial(alone, self._after_forward)))
        if self._places is not None or self._autocast_scales:
            for optimizer in base_optimizers(engine):
                self._patches.add(optimizer.register_step_pre_hook(partial(alone, self._before_optimizer)))
        self._around("backward", partial(alone, self._before_backward), partial(alone, self._after_backward))
        if self._ordered is not None:
            self._ordered.connect()
            self._ordered.look = lambda boundary: bool(play(self._look, boundary))
        else:
            reduce = getattr(engine, "allreduce_gradients", None)
            self._around("allreduce_gradients", partial(play, self._before_reduction, reduce))
        # called once per optimizer step, after the reduction (0.12 to 0.19)
        self._around("_take_model_step", partial(play, self._before_update), partial(play, listener.after_step))
        self._around("save_checkpoint", partial(tried, self._before_checkpoint))
        self._around("destroy", partial(tried, self._before_destroy))

    def close(self) -> None:
        """Remove every hook. An ordered reduction goes on when the observer broke: the arithmetic must not change."""
        self._patches.undo()
        self._local.close()
        if self._ordered is not None:
            self._ordered.look = None
            if self._listener is None or self._listener.closed:
                self._ordered.close()

    def _around(self, name: str, before: Callable[..., object], after: Callable[[], object] | None = None) -> None:
        if not hasattr(self._engine, name):
            raise ConfigError(
                f"silent_consistency needs DeepSpeedEngine.{name}, which DeepSpeed {deepspeed.__version__} does not "
                "have; use DeepSpeed 0.16.9 to 0.19.8"
            )
        self._patches.around(self._engine, name, before, after)

    # -- before and after engine methods -------------------------------------------------------------------------

    def _before_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The raw local loss; its own gradient is loss_scale / accumulation steps, in every version and wrapper."""
        self._sampler.loss(loss)
        if self._scales_loss and loss.requires_grad:
            steps = self._engine.gradient_accumulation_steps() if kwargs.get("scale_wrt_gas", True) else 1
            keep: Any = partial(self.together.alone, self._keep_scale, steps)
            loss.register_hook(keep)  # type: ignore[no-untyped-call]

    def _after_backward(self) -> None:
        """Behind the boundary's backward the result is still what the reduction made of it.

        From then on until ``engine.step``, scripts clip and scale. Who calls neither ``engine.backward`` nor the
        reduction here is looked at in the step.
        """
        if self._reducing and self._early:
            self._reducing = False
            self._sampler.reduced(self._aggregated())

    def _keep_scale(self, steps: int, gradient: Tensor) -> None:
        self._loss_scale = gradient.detach().float() * steps

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """The micro-batch's rows, by content where the script does not tell their ids, and its label tokens.

        In evaluation mode nobody knows yet: an evaluation, or a training that forgot to call ``train()``. The newest
        forward is kept until a gradient comes.
        """
        if not torch.is_grad_enabled():
            return
        if self._engine.module.training:  # `engine.module.eval()` leaves the engine's own flag
            self._evaluated = self._evaluated_loss = None
            self.conduct.before_forward()
            self._rows.forward(args, kwargs, self._loaders.forward())
        else:
            self._evaluated = lambda: self._rows.forward(args, kwargs, self._loaders.forward())

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        """Torch-style ``loss.backward()`` never calls ``engine.backward``: then the forward's loss is the loss."""
        if not torch.is_grad_enabled():
            return
        loss = loss_in(output)
        if self._engine.module.training:
            self.conduct.after_forward()
            if loss is not None:
                self._sampler.forward_loss(loss)
        else:
            self._evaluated_loss = None if loss is None else loss.detach()

    def _train_in_evaluation_mode(self, forward: Callable[[], None]) -> None:
        """The forward that was kept was a training's after all."""
        forward()
        if self._evaluated_loss is not None:
            self._sampler.late_forward_loss(self._evaluated_loss)
        self._evaluated = self._evaluated_loss = None

    def _before_reduction(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Called at the end of every backward; at the boundary, before stages 0 and 1 reduce (overlap: while)."""
        boundary = self._is_boundary()
        if self._kept is not None and boundary:
            self.together.alone(self._kept.keep)
            self._reduce = lambda: reduce(*args, **kwargs)
        if self._look(boundary) and not self._local.copied and self.together.once(lambda: self._gram is None):
            self._gram = self._local.exchange(self.group, self.together)

    def _look(self, boundary: bool) -> bool:
        """A micro-batch's gradients are all there; whether the inner products are due before the reduction."""
        if boundary and self._listener is not None:
            self._listener.before_reduction()
        if not self._measures():
            return False
        if boundary:
            self._reducing = True
            self.together.alone(self._local.observe_silent, self._exact)
        self.together.alone(self._local.end_micro_batch)
        return boundary and self._exact

    def _before_update(self, *args: Any, **kwargs: Any) -> None:
        assert self._listener is not None
        self._listener.before_step()

    def _before_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._listener is not None:
            self._listener.before_checkpoint()

    def _before_destroy(self, *args: Any, **kwargs: Any) -> None:
        if self._listener is not None:
            self._listener.close()

    # -- the gradients --------------------------------------------------------------------------------------------

    def _gradient(self, index: int, gradient: Tensor) -> None:
        if self._evaluated is not None:
            self._train_in_evaluation_mode(self._evaluated)
        if self._measures():
            # an ordered reduction has the whole local gradient in one place when the boundary's backward has ended
            boundary = self._is_boundary() and self._ordered is None
            self._local.observe(index, gradient, boundary, self._exact)

    def _held_locally(self, index: int) -> Tensor | None:
        return self._held(index) if self._ordered is None else self._ordered.held(index)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """``torch.optim.Optimizer.register_step_pre_hook``: once per step, under ZeRO once per parameter group."""
        self._stepped = True
        if self._places is not None and self._measuring:
            self._sampler.apply(applied_gradients(optimizer, self._places))

    def _measures(self) -> bool:
        if self._measuring is None:
            assert self._listener is not None
            step, listener = self._listener.scheduled, self._listener
            measuring = listener.measures(step)
            # in one statement: whether the ranks exchange exactly must never be half decided
            self._measuring, self._exact = measuring, measuring and listener.measures_exactly(step)
            if measuring:
                self.together.alone(self.conduct.look_at_modes)
        return self._measuring

    def _is_boundary(self) -> bool:
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def _hashes(self, replica: Tensor | None) -> Tensor:
        """int64 (1 + L,) or (1,): the replica's checksum and, where every rank holds the aggregate, its layers'."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device) if replica is None else replica.reshape(1)
        if not self.aggregate_replicated:
            return first
        held = [self._held(index) for index in range(len(self._parameters))]
        return torch.cat((first, self._checksums(held)))

    def _scale(self) -> float | Tensor:
        """The factor on every gradient of this step. Only ZeRO's fp16 scales when ``engine.backward`` is bypassed."""
        if not self._scales_loss:
            return 1.0
        if self._loss_scale is not None:
            return self._loss_scale
        optimizer = self._engine.optimizer
        return float(optimizer.loss_scale) if isinstance(optimizer, ZeROOptimizer) else 1.0
