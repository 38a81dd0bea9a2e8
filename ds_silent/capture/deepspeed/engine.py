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
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.capture.base import Listener
from ds_silent.capture.deepspeed.applied import applied_gradients, applied_places, base_optimizers
from ds_silent.capture.deepspeed.arithmetic import arithmetic_of, scales_loss
from ds_silent.capture.deepspeed.gradients import (
    accumulated_gradients,
    aggregated_gradients,
    numel_of,
    share_of,
    whole_on_every_rank,
)
from ds_silent.capture.deepspeed.groups import data_parallel_group, own_group
from ds_silent.capture.deepspeed.ordered import OrderedReduction
from ds_silent.capture.deepspeed.replicated import replica_of, replicated_parameters, replicated_state
from ds_silent.capture.deepspeed.retry import KeptGradients
from ds_silent.capture.local import LocalGradient, layers_of, loss_in
from ds_silent.capture.patches import Patches
from ds_silent.capture.rows import RowIds, id_capacity
from ds_silent.capture.sampler import Part, Sends, StepSampler
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.exchange import LocalSample
from ds_silent.replicas import Items, LayerChecksums, Replica
from ds_silent.sample_ids import packed_size
from ds_silent.sketch import fold


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
        self._places = applied_places(engine, self._parameters, self._share) if checks else None
        self.aggregate_replicated = checks and self._share is not None and whole_on_every_rank(engine)
        self.clip: float = float(engine.gradient_clipping())

        capacity = id_capacity(config, self.rows_per_step)
        self.id_size = packed_size(capacity) if config.coverage else 0
        self._rows = RowIds(enabled=config.coverage, capacity=capacity)
        sends = Sends(config.direction.per_layer or checks, checks, applied=self._places is not None)
        self._sampler = StepSampler(self._local, self._rows, sends)
        self._scales_loss = scales_loss(engine)
        self._listener: Listener | None = None
        self._patches = Patches()
        self._start_step()

    def _start_step(self) -> None:
        self._measuring: bool | None = None  # decided at the step's first gradient, from rank-agreed state
        self._exact = False
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
        """
        return self._scales_loss and not self._engine.was_step_applied()

    @property
    def rows_waiting(self) -> bool:
        return self._rows.waiting

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Parameters that every rank holds whole, and a function that names all else that is replicated."""
        return replicated_parameters(self._engine), lambda: replicated_state(self._engine)

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Ids of the rows of this rank's next micro-batch."""
        self._rows.given(sample_ids)

    def fail(self, error: Exception) -> None:
        """Remember an internal error; the next sample tells all ranks."""
        self._sampler.fail(error)

    def sample(self, exact: bool, replica: Tensor | None = None) -> LocalSample:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
            replica: int64 (), checksum of this rank's replica, where it is due.
        """
        if self._ordered is not None:
            self._gram = self._ordered.gram
        if exact and self._gram is None:
            self._exchange_exactly()
        scale = self._sampler.guarded(self._scale)
        hashes = self._sampler.guarded(lambda: self._hashes(replica))
        sample = self._sampler.sample(self._aggregated(), 1.0 if scale is None else scale, self._gram, hashes)
        if replica is not None:
            sample.scalars["replica_seen"] = 1.0
        return sample

    def _aggregated(self) -> Iterator[Part] | None:
        return self._sampler.guarded(lambda: aggregated_gradients(self._engine, self._parameters, self._share))

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
        return self._sampler.sample_again(self._aggregated(), self._sampler.guarded(lambda: self._hashes(None)))

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

    def take_micro_batches(self, layer_size: int) -> Tensor | None:
        """(A, L, layer_size) fp32 sketches of this step's micro-batches, on all ranks or on none.

        Zeros where something broke here, or where there were more or fewer than configured.
        """
        if not self._keeping:
            return None
        self._keeping = None
        kept = self._sampler.guarded(self._local.take_micro_batches) or []
        if len(kept) != self.micro_batches:
            return torch.zeros(self.micro_batches, len(self.layer_names), layer_size, device=self.device)
        return fold(torch.stack(kept), layer_size)

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        self._sampler.end_step(observed=bool(self._measuring) and not self.skipped)
        self._start_step()
        if self._keeping is False:
            self._keeping = True
            self._sampler.guarded(self._local.keep_micro_batches)

    # -- connecting and disconnecting ---------------------------------------------------------------------------

    def connect(self, listener: Listener) -> None:
        self._listener = listener
        engine = self._engine
        for index, parameter in enumerate(self._parameters):
            self._patches.add(parameter.register_hook(self._gradient_hook(index)))
        self._patches.add(engine.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self._patches.add(engine.register_forward_hook(self._after_forward))
        if self._places is not None:
            for optimizer in base_optimizers(engine):
                self._patches.add(optimizer.register_step_pre_hook(self._before_optimizer))
        self._wrap("backward", self._backward)
        if self._ordered is not None:
            self._ordered.connect()
            self._ordered.look = self._look
        else:
            self._wrap("allreduce_gradients", self._allreduce_gradients)
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("save_checkpoint", self._save_checkpoint)
        self._wrap("destroy", self._close_first)

    def close(self) -> None:
        """Remove every hook. An ordered reduction goes on when the observer broke: the arithmetic must not change."""
        self._patches.undo()
        self._local.close()
        if self._ordered is not None:
            self._ordered.look = None
            if self._listener is None or self._listener.closed:
                self._ordered.close()

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        if not hasattr(self._engine, name):
            raise ConfigError(
                f"silent_consistency needs DeepSpeedEngine.{name}, which DeepSpeed {deepspeed.__version__} does not "
                "have; use DeepSpeed 0.16.9 to 0.19.8"
            )
        self._patches.wrap(self._engine, name, wrapper)

    # -- wrappers of engine methods -----------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The raw local loss; its own gradient is loss_scale / accumulation steps, in every version and wrapper."""
        self._sampler.loss(loss)
        if self._scales_loss and loss.requires_grad:
            steps = self._engine.gradient_accumulation_steps() if kwargs.get("scale_wrt_gas", True) else 1

            def keep_scale(gradient: Tensor) -> None:
                self._loss_scale = gradient.detach().float() * steps

            loss.register_hook(keep_scale)  # type: ignore[no-untyped-call]
        return original(loss, *args, **kwargs)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """The micro-batch's rows, by content where the script does not tell their ids, and its label tokens."""
        if module.training and torch.is_grad_enabled():
            self._sampler.guarded(lambda: self._rows.forward(args, kwargs))

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        """Torch-style ``loss.backward()`` never calls ``engine.backward``: then the forward's loss is the loss."""
        if module.training and torch.is_grad_enabled():
            loss = loss_in(output)
            if loss is not None:
                self._sampler.forward_loss(loss)

    def _allreduce_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called at the end of every backward; at the boundary, before stages 0 and 1 reduce (overlap: while)."""
        if self._kept is not None and self._is_boundary():
            self._sampler.guarded(self._kept.keep)
            self._reduce = lambda: original(*args, **kwargs)
        if self._look(self._is_boundary()) and not self._local.copied and self._gram is None:
            self._exchange_exactly()
        return original(*args, **kwargs)

    def _look(self, boundary: bool) -> bool:
        """A micro-batch's gradients are all there; whether the inner products are due before the reduction."""
        if boundary and self._listener is not None:
            self._listener.before_reduction()
        if not self._measures():
            return False
        if boundary:
            self._sampler.guarded(lambda: self._local.observe_silent(self._exact))
        self._sampler.guarded(self._local.end_micro_batch)
        return boundary and self._exact

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Present in 0.12 to 0.19, called once per optimizer step, after the reduction."""
        listener = self._listener
        assert listener is not None
        listener.before_step()
        result = original(*args, **kwargs)
        listener.after_step()
        return result

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._listener is not None:
            self._listener.before_checkpoint()
        return original(*args, **kwargs)

    def _close_first(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._listener is not None:
            self._listener.close()
        return original(*args, **kwargs)

    # -- the gradients --------------------------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self._measures():
                # an ordered reduction has the whole local gradient in one place when the boundary's backward has ended
                boundary = self._is_boundary() and self._ordered is None
                self._sampler.guarded(lambda: self._local.observe(index, gradient, boundary, self._exact))

        return hook

    def _held_locally(self, index: int) -> Tensor | None:
        return self._held(index) if self._ordered is None else self._ordered.held(index)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """``torch.optim.Optimizer.register_step_pre_hook``: once per step, under ZeRO once per parameter group."""
        places = self._places
        if places is not None and self._measuring:
            self._sampler.guarded(lambda: self._sampler.apply(applied_gradients(optimizer, places)))

    def _measures(self) -> bool:
        if self._measuring is None:
            assert self._listener is not None
            step = self._listener.scheduled
            self._measuring = self._listener.measures(step)
            self._exact = self._measuring and self._listener.measures_exactly(step)
        return self._measuring

    def _is_boundary(self) -> bool:
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def _exchange_exactly(self) -> None:
        """The exact inner products; every rank takes part, with zeros where something broke."""
        self._gram = self._local.exchange(self._sampler.guarded(self._local.parts) or [], self.group)

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
