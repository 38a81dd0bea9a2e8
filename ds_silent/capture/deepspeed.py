"""DeepSpeed's gradients, seen from leaf hooks. The only file that touches DeepSpeed's inside.

    capture = DeepSpeedCapture(engine, config)
    capture.connect(listener)            # hooks and wrappers on this engine instance only
    sample = capture.sample(exact=False)
    capture.close()                      # the engine is as it was

Every touch of a DeepSpeed internal says what it relies on; all were read in 0.16.9 and 0.19.8.

The local gradient comes from ``torch.Tensor.register_hook`` on each trainable parameter: a leaf pre-hook, called with
the gradient of one micro-batch before it is accumulated and before DeepSpeed's own hooks. It returns None (a returned
tensor would replace the gradient) and keeps no reference (that would disable buffer stealing).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_silent.capture.base import Listener
from ds_silent.capture.local import Accumulated, LocalGradient, layers_of, loss_in
from ds_silent.capture.patches import Patches
from ds_silent.capture.rows import RowIds, id_capacity
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.exchange import LocalSample
from ds_silent.sample_ids import packed_size

logger = logging.getLogger("ds_silent")
_Result = TypeVar("_Result")
ONE_BIT_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def refuse_unsupported_config(ds_config: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for what reduces gradients where they cannot be seen; equal on all ranks."""
    zero = ds_config.get("zero_optimization") or {}
    optimizer = str((ds_config.get("optimizer") or {}).get("type", ""))
    found = None
    if (ds_config.get("compile") or {}).get("deepcompile"):
        found = "compile.deepcompile true (it reduces gradients inside the compiled graph)"
    elif isinstance(zero, Mapping) and zero.get("zenflow"):
        found = "zero_optimization.zenflow (it applies parts of the gradient at different steps)"
    elif re.sub(r"[^a-z0-9]", "", optimizer.lower()) in ONE_BIT_OPTIMIZERS:
        found = f"optimizer.type {optimizer} (it communicates compressed momentum, not gradients)"
    elif ds_config.get("sparse_gradients"):
        found = "sparse_gradients true (they are gathered, not reduced)"
    if found:
        raise ConfigError(
            f'silent_consistency cannot observe {found}; remove it, or set "silent_consistency": {{"enabled": false}}'
        )


def refuse_unsupported_engine(engine: Any) -> None:
    """Raise :class:`ConfigError` for parallelism whose ranks do not hold the same parameters; equal on all ranks."""
    found = None
    if isinstance(engine, PipelineEngine):
        found = "pipeline parallelism"
    elif engine.mp_world_size > 1:
        found = "tensor parallelism"
    elif engine.sequence_parallel_size > 1:
        found = "sequence parallelism"
    elif engine.has_moe_layers:
        found = "mixture-of-experts layers"
    if found:
        raise ConfigError(
            f"silent_consistency does not support {found} in this version, because it compares ranks that hold the "
            'same parameters; set "silent_consistency": {"enabled": false}'
        )


class DeepSpeedCapture:
    """Captures one engine's local and aggregated gradients; see the module docstring."""

    def __init__(self, engine: Any, config: SilentConsistencyConfig):
        self._engine = engine
        # engine.data_parallel_group may be None; the sequence-data-parallel group is the dense one
        group = engine.seq_data_parallel_group
        self.group: dist.ProcessGroup = group if group is not None else dist.distributed_c10d._get_default_group()
        self.device: torch.device = torch.device(engine.device)
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self.layer_names, layers = layers_of([name for name, _ in named])
        self._per_layer = config.direction.per_layer

        # Stages 2 and 3 reduce and free every micro-batch; with overlap, stage 1 reduces during the last backward.
        additive = bool(engine.zero_optimization_partition_gradients())
        overlapped = bool(engine.zero_overlap_comm()) and engine.zero_optimization_stage() > 0
        self._local = LocalGradient(
            [_numel(p) for p in self._parameters],
            layers,
            config.direction,
            self.device,
            accumulated_gradients(engine, self._parameters),
            additive=additive,
            norms_add_up=not (additive and engine.gradient_accumulation_steps() > 1),
            copied=additive or overlapped,
        )
        capacity = id_capacity(config, self.rows_per_step)
        self.id_size = packed_size(capacity) if config.coverage else 0
        self._rows = RowIds(enabled=config.coverage, capacity=capacity)
        self._scales_loss = bool(engine.fp16_enabled()) or getattr(engine, "torch_autocast_z0_gradscaler", None)
        self._listener: Listener | None = None
        self._patches = Patches()
        self._failure: Exception | None = None
        self._measuring: bool | None = None
        self.end_step()

    # -- what the observer reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1 (``engine.global_steps`` counts finished ones, skipped ones too)."""
        return int(self._engine.global_steps) + 1

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
        return bool(self._scales_loss) and not self._engine.was_step_applied()

    @property
    def rows_waiting(self) -> bool:
        return self._rows.waiting

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Ids of the rows of this rank's next micro-batch."""
        self._rows.given(sample_ids)

    def fail(self, error: Exception) -> None:
        """Remember the first internal error and say it once; the next sample tells all ranks."""
        if self._failure is None:
            self._failure = error
            logger.warning("ds_silent: internal error on rank %d: %s: %s", dist.get_rank(), type(error).__name__, error)

    def sample(self, exact: bool) -> LocalSample:
        """This rank's observation of the step, taken between the reduction and the optimizer.

        Args:
            exact: also exchange the local gradients piece by piece; the same on every rank, because it communicates.
        """
        if exact and self._gram is None:
            self._exchange_exactly()
        sample = self._guarded(self._sample)
        if sample is None:
            self._local.accumulator.clear()
            return LocalSample({"failed": 1.0}, gram=self._gram)
        return sample

    def end_step(self) -> None:
        """Forget the step that was taken; an internal error stays until all ranks have read it."""
        self._local.start_step()
        self._rows.end_step()
        self._measuring = None  # decided at the step's first gradient, from rank-agreed state
        self._exact = False
        self._losses: list[Tensor] = []
        self._forward_losses: list[Tensor] = []
        self._loss_scale: Tensor | None = None
        self._gram: Tensor | None = None

    # -- connecting and disconnecting ---------------------------------------------------------------------------

    def connect(self, listener: Listener) -> None:
        self._listener = listener
        engine = self._engine
        for index, parameter in enumerate(self._parameters):
            self._patches.add(parameter.register_hook(self._gradient_hook(index)))
        self._patches.add(engine.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self._patches.add(engine.register_forward_hook(self._after_forward))
        self._wrap("backward", self._backward)
        self._wrap("allreduce_gradients", self._allreduce_gradients)
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("save_checkpoint", self._flush_first)
        self._wrap("destroy", self._close_first)

    def close(self) -> None:
        self._patches.undo()
        self._local.close()

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
        self._forward_losses.clear()
        self._losses.append(loss.detach())
        if self._scales_loss and loss.requires_grad:
            steps = self._engine.gradient_accumulation_steps() if kwargs.get("scale_wrt_gas", True) else 1

            def keep_scale(gradient: Tensor) -> None:
                self._loss_scale = gradient.detach().float() * steps

            loss.register_hook(keep_scale)  # type: ignore[no-untyped-call]
        return original(loss, *args, **kwargs)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """The micro-batch's rows, by content where the script does not tell their ids, and its label tokens."""
        if module.training and torch.is_grad_enabled():
            self._guarded(lambda: self._rows.forward(args, kwargs))

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        """Torch-style ``loss.backward()`` never calls ``engine.backward``: then the forward's loss is the loss."""
        if module.training and torch.is_grad_enabled():
            loss = loss_in(output)
            if loss is not None:
                self._forward_losses.append(loss.detach())

    def _allreduce_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called at the end of every backward; at the boundary, before stages 0 and 1 reduce (overlap: while)."""
        if self._is_boundary() and self._measures():
            self._guarded(lambda: self._local.observe_silent(self._exact))
            if self._exact and not self._local.copied and self._gram is None:
                self._exchange_exactly()
        return original(*args, **kwargs)

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Present in 0.12 to 0.19, called once per optimizer step, after the reduction."""
        listener = self._listener
        assert listener is not None
        listener.before_step()
        result = original(*args, **kwargs)
        listener.after_step()
        return result

    def _flush_first(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._listener is not None:
            self._listener.flush()
        return original(*args, **kwargs)

    def _close_first(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._listener is not None:
            self._listener.close()
        return original(*args, **kwargs)

    # -- the gradients --------------------------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self._measures():
                self._guarded(lambda: self._local.observe(index, gradient, self._is_boundary(), self._exact))

        return hook

    def _measures(self) -> bool:
        if self._measuring is None:
            assert self._listener is not None
            self._measuring = self._listener.measures(self.step)
            self._exact = self._measuring and self._listener.measures_exactly(self.step)
        return self._measuring

    def _is_boundary(self) -> bool:
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def _guarded(self, function: Callable[[], _Result]) -> _Result | None:
        """Run what touches only this rank. A bug in it must not stop the training: all ranks switch off instead."""
        if self._failure is None:
            try:
                return function()
            except Exception as error:
                self.fail(error)
        return None

    def _exchange_exactly(self) -> None:
        """The exact inner products; every rank takes part, with zeros where something broke."""
        self._gram = self._local.exchange(self._guarded(self._local.parts) or [], self.group)

    def _sample(self) -> LocalSample:
        local = self._local
        scalars: dict[str, float | Tensor] = {
            "gradient_seen": float(local.seen),
            "norm_seen": float(local.norm_seen),
            "loss_scale": self._scale(),
        }
        losses = self._losses or self._forward_losses
        if losses:
            scalars["loss_sum"] = torch.stack([loss.float().reshape(()) for loss in losses]).sum()
            scalars["loss_count"] = float(len(losses))
        if local.leftover is not None:
            scalars["leftover_squared"] = local.leftover
        scalars["fired"] = float(local.fired)
        tokens = self._rows.take_label_tokens()
        if tokens is not None:
            scalars["label_tokens"] = tokens
        ids = self._rows.take(self.device)
        sketches, squares = local.accumulator.take()
        scalars["squared_norm"] = squares.sum()
        aggregate, aggregate_squared = self._aggregate()
        scalars["aggregate_seen"] = float(aggregate is not None)
        if aggregate_squared is not None:
            scalars["aggregate_squared"] = aggregate_squared
        return LocalSample(
            scalars=scalars,
            sketch=sketches.sum(0) if local.sketching else None,
            aggregate=aggregate if local.sketching else None,
            layer_squares=squares,
            ids=ids,
            layer_sketches=sketches if self._per_layer and local.sketching else None,
            gram=self._gram,
        )

    def _aggregate(self) -> tuple[Tensor | None, Tensor | None]:
        """Sketch and squared norm of the part of the aggregated gradient that this rank answers for."""
        local = self._local
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = aggregated_gradients(self._engine, self._parameters, local.offsets, local.total, rank, ranks)
        if parts is None:
            return None, None
        for index, start, values in parts:
            local.accumulator.add(index, values, start=start, sketching=local.sketching)
        sketches, squares = local.accumulator.take()
        return sketches.sum(0), squares.sum()

    def _scale(self) -> float | Tensor:
        """The factor on every gradient of this step. Only ZeRO's fp16 scales when ``engine.backward`` is bypassed."""
        if not self._scales_loss:
            return 1.0
        if self._loss_scale is not None:
            return self._loss_scale
        optimizer = self._engine.optimizer
        return float(optimizer.loss_scale) if isinstance(optimizer, ZeROOptimizer) else 1.0


def accumulated_gradients(engine: Any, parameters: list[Tensor]) -> Accumulated:
    """Where a parameter's gradient of the step's earlier micro-batches lies, in stages 0 and 1.

    * ``BF16_Optimizer``: ``fp32_groups_gradients[group][i]``, valid when ``fp32_groups_has_gradients[group][i]``.
    * ``DeepSpeedZeroOptimizer`` with ``use_grad_accum_attribute``: ``parameter.grad_accum``.
    * everything else: ``parameter.grad``.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        place = {id(p): (g, i) for g, group in enumerate(optimizer.bf16_groups) for i, p in enumerate(group)}
        places = [place[id(p)] for p in parameters]

        def of_bf16(index: int) -> Tensor | None:
            group, i = places[index]
            held: Tensor = optimizer.fp32_groups_gradients[group][i]
            return held if optimizer.fp32_groups_has_gradients[group][i] else None

        return of_bf16
    if getattr(optimizer, "use_grad_accum_attribute", False):
        return lambda index: getattr(parameters[index], "grad_accum", None)
    return lambda index: parameters[index].grad


def aggregated_gradients(
    engine: Any, parameters: list[Tensor], offsets: list[int], total: int, rank: int, ranks: int
) -> Iterator[tuple[int, int, Tensor]] | None:
    """This rank's share of the aggregated gradient: (parameter, first element, values), or None where it is hidden.

    The shares of all ranks make up the whole, once. Valid between the boundary's backward and the optimizer step.

    * Stage 0 and ``BF16_Optimizer`` hold all of it on every rank: each rank takes an N-th.
    * Stages 1 and 2: what this rank owns, by ``parameter._hp_mapping`` (``deepspeed/utils/tensor_fragment.py``).
    * Stage 3: this rank's shard, ``__param_id_to_grad_partition`` of ``DeepSpeedZeroOptimizer_Stage3``.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if isinstance(optimizer, BF16_Optimizer) or stage == 0:
        held = accumulated_gradients(engine, parameters)
        return _slices(held, offsets, rank * total // ranks, (rank + 1) * total // ranks)
    if stage == 3:
        shards = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None)
        return (
            None if shards is None or ranks != engine.optimizer.partition_count else _shards(parameters, shards, rank)
        )
    if all(hasattr(parameter, "_hp_mapping") for parameter in parameters):
        return _fragments(parameters)
    return None


def _slices(held: Accumulated, offsets: list[int], begin: int, end: int) -> Iterator[tuple[int, int, Tensor]]:
    for index, offset in enumerate(offsets):
        values = held(index) if offset < end else None
        if values is not None:
            low, high = max(begin - offset, 0), min(end - offset, values.numel())
            if low < high:
                yield index, low, values.detach().reshape(-1)[low:high]


def _fragments(parameters: list[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    for index, parameter in enumerate(parameters):
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # set by DeepSpeed
        if mapping is not None:
            address = mapping.lp_fragment_address
            fragment = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
            if fragment is not None:
                yield index, address.start, fragment.reshape(-1)[: address.numel]


def _shards(parameters: list[Any], shards: Mapping[int, Tensor], rank: int) -> Iterator[tuple[int, int, Tensor]]:
    for index, parameter in enumerate(parameters):
        begin = rank * parameter.partition_numel()
        length = min(parameter.partition_numel(), parameter.ds_numel - begin)
        if length > 0:
            yield index, begin, shards[parameter.ds_id].reshape(-1)[:length]


def _numel(parameter: Any) -> int:
    """Elements of the whole parameter; under ZeRO-3 the tensor itself is empty and ``ds_numel`` knows."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
