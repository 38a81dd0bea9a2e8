"""One DeepSpeed engine: what it answers, and where its hooks are.

framework = DeepSpeedFramework(engine, config)
framework.connect(moments)           # hooks and wrappers on this engine instance only
framework.close(ended=True)          # the engine is as it was
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.capture.forwards import loss_in
from ds_silent.capture.loss_origin import Made, comes_of, is_share, made_by, reduction_near
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.framework import Framework, GatheredPiece, Moments, Part, Peers, Promise, Setting, StepCounts, WeightCopy
from ds_silent.frameworks.deepspeed.engine_rules import ConfigOptimizer, StepCalls
from ds_silent.frameworks.deepspeed.engine_settings import arithmetic_of, scales_loss, settings_of
from ds_silent.frameworks.deepspeed.masters import gathered_by, masters_of, shards_of
from ds_silent.frameworks.deepspeed.ordered import OrderedReduction
from ds_silent.frameworks.deepspeed.reduction import (
    KeptGradients,
    LeftGradients,
    accumulated_gradients,
    aggregated_gradients,
    applied_gradients,
    applied_places,
    base_optimizers,
    reduced_after_backward,
    reduces_what_accumulates,
    share_of,
    whole_on_every_rank,
)
from ds_silent.frameworks.deepspeed.state import (
    OF_A_MESH,
    WORDS,
    data_parallel_group,
    duplicates_of,
    is_pipeline,
    numel_of,
    parameter_groups,
    replica_of,
    replicated_parameters,
    replicated_state,
    shape_of,
    whole_shape,
)
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.maths.rounding_bound import Arithmetic

logger = logging.getLogger("ds_silent")


class EngineCounts(StepCounts):
    """Read the counters of an engine, which are in its own checkpoints."""

    def __init__(self, engine: Any, ranks: int, sequence: int):
        """Take the ``ranks`` of its data-parallel group, of which ``sequence`` share each row."""
        super().__init__(ranks)
        self._engine = engine
        rows = int(engine.train_micro_batch_size_per_gpu()) * int(engine.gradient_accumulation_steps())
        rows = rows * ranks // sequence
        self._counted = max(1, int(engine.train_batch_size()) // max(1, rows))  # AutoTP counts each row on each rank

    @property
    def step(self) -> int:
        """Return one more than ``engine.global_steps``, which counts finished ones, skipped ones too."""
        return int(self._engine.global_steps) + 1

    @property
    def samples(self) -> int:
        return int(self._engine.global_samples) // self._counted

    @property
    def batch(self) -> float:
        return float(self._engine.train_batch_size()) / self._counted / self.data_ranks

    @property
    def update_skipped(self) -> bool:
        """Ask ``engine.was_step_applied()``, 0.12 to 0.19."""
        return not self._engine.was_step_applied()

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: a checkpoint of the engine is loaded by itself."""


class Losses:
    """Tell the moments of each micro-batch's loss, as ``engine.backward`` or a pipeline has it.

    Args:
        writes: whether this rank says what is wrong on all alike.
    """

    def __init__(self, engine: Any, micro_batches: int, writes: bool):
        self._engine, self._micro_batches, self._writes = engine, micro_batches, writes
        self._forward_loss: Made | None = None  # of the newest forward
        self._told = False  # that a script divides it, too
        self._divides_outputs = hasattr(engine, "_backward_prologue_per_tensor")  # in hooks, see _below
        self._gave: bool | None = None  # whether the newest forward gave losses, reduced or not; None: no forward yet
        # its last stage calls engine.backward past this instance, which divides in those hooks until 0.19.7
        self._pipelined = is_pipeline(engine) and not hasattr(engine_module, "_ENGINE_BACKWARD_GRAPH_TRACKER")
        self.scaled = scales_loss(engine)

    def pipelined(self, moments: Moments, *args: Any, **kwargs: Any) -> None:
        """Tell the loss when all backwards of the step are over: the last stage has added up (0.16.9 to 0.19.8)."""
        total = self._engine.total_loss
        if isinstance(total, Tensor):
            moments.on_loss(total / self._engine.gradient_accumulation_steps())

    def forwarded(self, moments: Moments, module: Any, args: Any, output: Any) -> None:
        """Keep the forward's loss: a backward's may be a share of it."""
        self._forward_loss = made_by(loss_in(output) if torch.is_grad_enabled() else None)
        if self._divides_outputs and torch.is_grad_enabled():
            self._gave = isinstance(output, Tensor) and reduction_near(output) is not None
        moments.post_forward(module, args, output)

    def begins(self, moments: Moments, root: Any) -> None:
        """Tell what a backward begins with; the engine's own have told of their loss before."""
        by_hooks = self._gave is not None and (self._pipelined or not self._engine._running_engine_backward)
        if by_hooks and isinstance(root, Tensor):
            promise = Promise("DeepSpeed's hook on what its engine returns", self._engine.gradient_accumulation_steps())
            moments.on_loss_handed(None, promise, self._below(root, True))
        moments.pre_backward(root)

    def _below(self, loss: Tensor, divides: bool, by_engine: bool = False) -> float:
        """Return what hooks on the forward's output multiply by below a loss that the script makes of it.

        They divide by the accumulation steps: from 0.18.3 on in a script's own ``loss.backward()``, and until
        0.19.7 in ``engine.backward`` too (0.18.3 even with ``scale_wrt_gas=False``).
        """
        engine = self._engine
        if self._gave is not False or (by_engine and hasattr(engine_module, "_ENGINE_BACKWARD_GRAPH_TRACKER")):
            return 1.0
        if by_engine and not divides and hasattr(engine, "_scale_wrt_gas"):
            return 1.0
        return 1.0 if comes_of(loss, self._forward_loss) else 1.0 / int(engine.gradient_accumulation_steps())

    def before_backward(
        self, moments: Moments, scaled: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Tell the raw local loss; its own gradient is loss_scale / accumulation steps, in every version and wrapper.

        Without ``scale_wrt_gas`` the script has divided it already, as accelerate's and transformers' do: then the
        forward's loss is the true one. So it is where both divide, as Lightning and DeepSpeed do.
        """
        divides = kwargs.get("scale_wrt_gas", True)
        steps = int(self._engine.gradient_accumulation_steps())
        given = Promise("engine.backward with scale_wrt_gas=False", as_given=True)
        promise = Promise("engine.backward", steps) if divides else given
        moments.on_loss_handed(loss, promise, self._below(loss, divides, by_engine=True))
        if divides and is_share(loss, self._forward_loss, self._micro_batches):
            self._say_divided_twice()
        elif divides:
            moments.on_loss(loss)
        elif not comes_of(loss, self._forward_loss):
            moments.on_loss_share(loss)
        if self.scaled and loss.requires_grad:
            times = steps if divides else 1
            loss.register_hook(partial(scaled, times))  # type: ignore[no-untyped-call]

    def _say_divided_twice(self) -> None:
        """Say it once: it is alike on all ranks, so that no comparison of them shows it."""
        if not self._told and self._writes:
            logger.warning(
                "ds_silent: the loss is divided by %d micro-batches before engine.backward, which divides it again (so "
                "does Lightning with DeepSpeed): the gradient is 1/%d of their mean; choose the learning rate and "
                "gradient_clipping for that",
                self._micro_batches,
                self._micro_batches,
            )
        self._told = True


class DeepSpeedFramework(Framework):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    def __init__(self, engine: Any, config: SilentConsistencyConfig, came_with: Sequence[float | None] | None = None):
        training_group = data_parallel_group(engine)
        assert training_group is not None  # of an engine
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        super().__init__(engine.module, named, training_group, device=torch.device(engine.device))
        self._engine, self._shape, self.came_with = engine, shape_of(engine), came_with
        self.words = WORDS if self._shape.meshed is None else OF_A_MESH
        self.ranks_comparable, self.weights_sharded = self._shape.alike, engine.zero_optimization_stage() == 3
        self.forwards_alone = self._shape.plain and not self.weights_sharded
        self.numels, self.shapes = [numel_of(p) for p in self.parameters], [whole_shape(p) for p in self.parameters]
        rows, self.micro_batches = engine.train_micro_batch_size_per_gpu(), int(engine.gradient_accumulation_steps())
        self.counts = EngineCounts(engine, dist.get_world_size(self.group), self._shape.sequence)
        self.clip = float(engine.gradient_clipping())
        # Stages 2 and 3 reduce and free every micro-batch; with overlap, stage 1 reduces during the last backward.
        self.reduces_every_micro_batch = bool(engine.zero_optimization_partition_gradients())
        self.overlaps_backward = bool(engine.zero_overlap_comm()) and engine.zero_optimization_stage() > 0
        self._pipeline = is_pipeline(engine)  # looked at once per step, so that nothing is known of each micro-batch
        if self._pipeline:
            self.micro_batches, self.micro_batches_at_once = 1, self.micro_batches
        self.micro_batch_rows = int(rows) * self.micro_batches_at_once
        self.own_rules = [StepCalls(engine, self.micro_batches), ConfigOptimizer(engine, self.optimizers)]
        writes = dist.get_rank(self.group) == 0
        self._losses = Losses(engine, self.micro_batches, writes)
        self._autocast_scales = getattr(engine, "torch_autocast_z0_gradscaler", None) is not None
        self._share = share_of(engine, self.parameters, self._shape)
        self._accumulated = accumulated_gradients(engine, self.parameters)
        self._ordered: OrderedReduction | None = None
        self._kept: KeptGradients | None = None
        if config.reduction == "ordered":
            self._ordered = OrderedReduction(engine, self.parameters, self._share, config, training_group)
        elif config.respond.on_aggregation_error == "retry":
            self._kept = KeptGradients(engine, self.parameters)
        # an ordered reduction has the whole local gradient in one place when the boundary's backward has ended
        self.hook_sees_full_gradient = self._ordered is None and not self._pipeline
        self.reads_together = self.hook_sees_full_gradient and reduces_what_accumulates(engine)
        checks = config.integrity.aggregation and config.direction.method != "off"
        clips = self.clip > 0.0 and self._shape.is_part  # by a norm of several groups: what is applied is not observed
        self._places = applied_places(engine, self.parameters, self._share) if checks and not clips else None
        self.observes_applied = self._places is not None
        whole = whole_on_every_rank(engine) and not self._shape.experts
        self.aggregate_replicated = checks and self._share is not None and whole
        if (every := config.integrity.replica_interval) and not self._shape.plain:
            self.peers = Peers(list(duplicates_of(engine, every, writes)))

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        reductions = self.micro_batches if self.reduces_every_micro_batch else 1
        ranks = dist.get_world_size(self.group)
        ordered, sequence = self._ordered is not None, self._shape.sequence
        return arithmetic_of(self._engine, elements, width, reductions, ranks, ordered, sequence)

    def seeks_loss_scale(self, applied: bool | None) -> bool:
        """Tell whether a step was skipped for it. ZeRO skips overflows of fp32 and bf16, too, where they are faults."""
        if self._autocast_scales and applied is not None:  # in stage 0 its scaler tells the engine nothing
            return not applied
        return self._losses.scaled and self.counts.update_skipped

    def is_boundary(self) -> bool:
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def accumulated(self, index: int) -> Tensor | None:
        return self._accumulated(index) if self._ordered is None else self._ordered.held(index)

    def reduced(self, index: int) -> Tensor | None:
        """Return what the reduction has put where gradients accumulate."""
        return self._accumulated(index)

    def aggregated(self) -> Iterator[Part] | None:
        return aggregated_gradients(self._engine, self.parameters, self._share)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        assert self._places is not None
        return applied_gradients(optimizer, self._places)

    def scale(self, seen: Tensor | None) -> float | Tensor:
        """Return what was seen; only ZeRO's fp16 scales when ``engine.backward`` is bypassed."""
        if not self._losses.scaled:
            return 1.0
        if seen is not None:
            return seen
        optimizer = self._engine.optimizer
        return float(optimizer.loss_scale) if isinstance(optimizer, ZeROOptimizer) else 1.0

    def gram(self) -> Tensor | None:
        return None if self._ordered is None else self._ordered.gram

    def parameter_groups(self) -> list[list[Tensor]]:
        return parameter_groups(self._engine.optimizer)

    def optimizers(self) -> list[Any]:
        return base_optimizers(self._engine)

    def settings(self) -> dict[str, Setting]:
        return settings_of(self._engine)

    def schedulers(self) -> list[Any]:
        return [] if self._engine.lr_scheduler is None else [self._engine.lr_scheduler]

    def copies(self) -> list[WeightCopy]:
        return masters_of(self._engine)

    def weights(self) -> Iterator[Part]:
        return shards_of(self.parameters, self.group) if self.weights_sharded else super().weights()

    def gathered(self) -> list[GatheredPiece]:
        return gathered_by(self._engine)

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        return replicated_parameters(self._engine), lambda: replicated_state(self._engine)

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Return what makes one replica in stage 0; its tensors may be written between two steps."""
        return replica_of(self._engine, optimizer_state, buffers)

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        self._engine.save_checkpoint(directory, tag=tag, client_state=client_state)

    # -- a reduction, repeated -----------------------------------------------------------------------------------

    def keep_for_again(self, *args: Any, **kwargs: Any) -> None:
        """Keep it in stages 0 and 1. An ordered reduction keeps its local sums by itself."""
        assert self._kept is not None
        self._kept.keep(*args, **kwargs)

    def reduce_again(self) -> int:
        """Repeat the step's reduction from the local gradients that were kept. A collective.

        Returns:
            bytes of the gradients that were reduced.
        """
        if self._ordered is not None:
            self._ordered.reduce()
            return self._ordered.local_bytes
        assert self._kept is not None
        return self._kept.reduce_again()

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        engine, patches, local = self._engine, self.patches, moments.guard.local
        gradient = patches.in_backward(partial(local, self._gradient, moments))
        scaled = patches.in_backward(moments.on_loss_scaled)
        self.script_hooks.on_left = lambda left: moments.on_gradients_left(left, self.is_boundary())
        for index, (parameter, name) in enumerate(zip(self.parameters, self.names, strict=True)):
            self.script_hooks.register(patches, name, parameter, partial(gradient, index))
        called = engine.module if self._pipeline else engine  # a pipeline's engine is not called
        patches.hook(called.register_forward_pre_hook, moments.pre_forward, with_kwargs=True)
        patches.hook(called.register_forward_hook, partial(local, self._losses.forwarded, moments))
        if self.observes_applied or self._autocast_scales:
            for optimizer in base_optimizers(engine):
                patches.hook(optimizer.register_step_pre_hook, moments.pre_optimizer_step)
        behind = moments.post_reduction if reduced_after_backward(engine) else None
        self._around("backward", partial(local, self._losses.before_backward, moments, scaled), behind)
        patches.before_backward(partial(local, self._losses.begins, moments))  # the engine's own, behind its scaling
        if self._pipeline:
            for name in ("allreduce_gradients", "_bf16_reduce_grads"):
                self._around(name, moments.post_backward)
                self._around(name, partial(local, self._losses.pipelined, moments))  # comes first
        elif self._ordered is not None:
            self._ordered.connect()
            self._ordered.look = moments.post_backward
        else:
            self._around("allreduce_gradients", moments.post_backward)
            self._around("allreduce_gradients", partial(local, self._read_left, moments))  # comes first
            LeftGradients(engine, patches, moments.guard, moments.on_gradient_dropped)
        # called once per optimizer step, after the reduction (0.12 to 0.19)
        self._around("_take_model_step", moments.pre_update, moments.post_step)
        self._around("save_checkpoint", moments.pre_checkpoint)
        self._around("destroy", moments.close)

    def _gradient(self, moments: Moments, index: int, gradient: Tensor) -> None:
        if not self.script_hooks.notes(index) and moments.on_gradient(index, gradient):
            self.script_hooks.leave_rest()

    def _read_left(self, moments: Moments, *_: Any, **__: Any) -> None:
        self.script_hooks.take_left()
        if self.reads_together and self.is_boundary():
            moments.on_accumulated()

    def close(self, ended: bool) -> None:
        """Remove every hook; an ordered reduction goes on when the observer broke: the arithmetic must not change."""
        self.patches.undo()
        if self._ordered is not None:
            self._ordered.look = None
            if ended:
                self._ordered.close()

    def _around(self, name: str, before: Callable[..., object], after: Callable[[], object] | None = None) -> None:
        if not hasattr(self._engine, name):
            raise ConfigError(
                f"silent_consistency needs DeepSpeedEngine.{name}, which DeepSpeed {deepspeed.__version__} does not "
                "have; use DeepSpeed 0.16.9 to 0.19.8"
            )
        self.patches.around(self._engine, name, before, after)
