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

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from ds_silent.capture.sampler import Part, Sends, StepSampler
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.exchange import LocalSample
from ds_silent.integrity import Arithmetic
from ds_silent.replicas import Checksums, Items, keys_of
from ds_silent.sample_ids import packed_size
from ds_silent.sketch import fold

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
    """Captures one engine's local, aggregated and applied gradients; see the module docstring."""

    def __init__(self, engine: Any, config: SilentConsistencyConfig):
        self._engine = engine
        # engine.data_parallel_group may be None; the sequence-data-parallel group is the dense one
        group = engine.seq_data_parallel_group
        self.group: dist.ProcessGroup = group if group is not None else dist.distributed_c10d._get_default_group()
        self.device: torch.device = torch.device(engine.device)
        named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self.layer_names, layers = layers_of([name for name, _ in named])
        self._layers = torch.tensor(layers, dtype=torch.int64, device=self.device)
        self._keys = keys_of(len(layers)).to(self.device)
        self._checksums: Checksums | None = None  # of the aggregate, whose dtype is known when there is one

        # Stages 2 and 3 reduce and free every micro-batch; with overlap, stage 1 reduces during the last backward.
        additive = bool(engine.zero_optimization_partition_gradients())
        overlapped = bool(engine.zero_overlap_comm()) and engine.zero_optimization_stage() > 0
        steps = int(engine.gradient_accumulation_steps())
        self.micro_batches = steps
        self._keeping: bool | None = None  # micro-batches: True in a step where they are kept, None when nobody asked
        self._held = accumulated_gradients(engine, self._parameters)
        checks = config.integrity.aggregation and config.direction.method != "off"
        self._local = LocalGradient(
            [_numel(p) for p in self._parameters],
            layers,
            config.direction,
            self.device,
            self._held,
            additive=additive,
            norms_add_up=not (additive and steps > 1),
            copied=additive or overlapped,
            by_layer=config.direction.per_layer or checks,
        )
        plan = self._local.accumulator.plan
        ranks = dist.get_world_size(self.group)
        self.arithmetic = arithmetic_of(engine, plan.numel, plan.width, steps if additive else 1, ranks)
        self._share = share_of(
            engine, self._parameters, self._local.offsets, self._local.total, dist.get_rank(self.group), ranks
        )
        self._places = applied_places(engine, self._parameters, self._share) if checks else None
        self.aggregate_replicated = checks and self._share is not None and _whole_on_every_rank(engine)
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
        if exact and self._gram is None:
            self._exchange_exactly()
        scale = self._sampler.guarded(self._scale)
        hashes = self._sampler.guarded(lambda: self._hashes(replica))
        parts = self._sampler.guarded(lambda: aggregated_gradients(self._engine, self._parameters, self._share))
        sample = self._sampler.sample(parts, 1.0 if scale is None else scale, self._gram, hashes)
        if replica is not None:
            sample.scalars["replica_seen"] = 1.0
        return sample

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
        self._wrap("allreduce_gradients", self._allreduce_gradients)
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("save_checkpoint", self._save_checkpoint)
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
        if self._measures():
            if self._is_boundary():
                self._sampler.guarded(lambda: self._local.observe_silent(self._exact))
                if self._exact and not self._local.copied and self._gram is None:
                    self._exchange_exactly()
            self._sampler.guarded(self._local.end_micro_batch)
        return original(*args, **kwargs)

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
                self._sampler.guarded(lambda: self._local.observe(index, gradient, self._is_boundary(), self._exact))

        return hook

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """``torch.optim.Optimizer.register_step_pre_hook``: once per step, under ZeRO once per parameter group."""
        places = self._places
        if places is not None and self._measuring:
            self._sampler.guarded(lambda: self._sampler.apply(applied_gradients(optimizer, places)))

    def _measures(self) -> bool:
        if self._measuring is None:
            assert self._listener is not None
            self._measuring = self._listener.measures(self.step)
            self._exact = self._measuring and self._listener.measures_exactly(self.step)
        return self._measuring

    def _is_boundary(self) -> bool:
        return bool(self._engine.is_gradient_accumulation_boundary()) and not self._engine.inside_no_sync_ctxt

    def _exchange_exactly(self) -> None:
        """The exact inner products; every rank takes part, with zeros where something broke."""
        self._gram = self._local.exchange(self._sampler.guarded(self._local.parts) or [], self.group)

    def _hashes(self, replica: Tensor | None) -> Tensor:
        """int64 (1 + L,) or (1,): the replica's checksum and, where every rank holds the aggregate, its layers'.

        An absent gradient counts as 0, which no gradient is likely to have.
        """
        first = torch.zeros(1, dtype=torch.int64, device=self.device) if replica is None else replica.reshape(1)
        if not self.aggregate_replicated:
            return first
        held = [self._held(index) for index in range(len(self._parameters))]
        if self._checksums is None:
            size = next((values.element_size() for values in held if values is not None), 4)
            self._checksums = Checksums([size * _numel(p) for p in self._parameters], self.device)
        sums = self._checksums(held)
        layers = torch.zeros(len(self.layer_names), dtype=torch.int64, device=self.device)
        return torch.cat((first, layers.index_add_(0, self._layers, sums * self._keys)))

    def _scale(self) -> float | Tensor:
        """The factor on every gradient of this step. Only ZeRO's fp16 scales when ``engine.backward`` is bypassed."""
        if not self._scales_loss:
            return 1.0
        if self._loss_scale is not None:
            return self._loss_scale
        optimizer = self._engine.optimizer
        return float(optimizer.loss_scale) if isinstance(optimizer, ZeROOptimizer) else 1.0


def scales_loss(engine: Any) -> bool:
    """Whether a loss scale is at work: fp16, autocast's scaler, and bf16 in stage 0 of 0.17, whose
    ``FP16_UnfusedOptimizer`` begins with a dynamic ``cur_scale`` of 2^16."""
    if engine.fp16_enabled() or getattr(engine, "torch_autocast_z0_gradscaler", None):
        return True
    return float(getattr(engine.optimizer, "cur_scale", 1.0)) != 1.0


# -- where DeepSpeed keeps what ------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Slice:
    """A run of one parameter's elements that this rank answers for."""

    index: int  # of the parameter
    start: int
    numel: int


def share_of(
    engine: Any, parameters: list[Tensor], offsets: list[int], total: int, rank: int, ranks: int
) -> list[Slice] | None:
    """What of the gradient this rank answers for; the ranks' shares make up the whole, once. None where it is hidden.

    * Stage 0 holds all of it on every rank: each rank takes an N-th.
    * ``BF16_Optimizer`` does too, but its optimizer is partitioned: the partition, by ``parameter._hp_mapping``.
    * Stages 1 and 2: what this rank owns, by ``parameter._hp_mapping`` (``deepspeed/utils/tensor_fragment.py``);
      with ``round_robin_gradients`` that speaks of the order before (0.16.9 to 0.19.8), see :func:`_dealt`.
    * Stage 3: this rank's shard.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        if ranks != getattr(optimizer, "partition_count", None) or not hasattr(optimizer, _SHARDS):
            return None
        shards = []
        for index, parameter in enumerate(parameters):
            size: int = parameter.partition_numel()  # type: ignore[attr-defined]  # set by DeepSpeed
            shards.append(Slice(index, rank * size, min(size, _numel(parameter) - rank * size)))
        return [shard for shard in shards if shard.numel > 0]
    if isinstance(optimizer, ZeROOptimizer):
        if not all(hasattr(parameter, "_hp_mapping") for parameter in parameters):
            return None
        if getattr(optimizer, "round_robin_gradients", False):
            if optimizer.cpu_offload:
                return None
            index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
            return [Slice(index_of[id(d.parameter)], d.start, d.numel) for d in _dealt(optimizer)]
        mappings = ((index, parameter._hp_mapping) for index, parameter in enumerate(parameters))  # type: ignore[attr-defined]
        addresses = [(index, mapping.lp_fragment_address) for index, mapping in mappings if mapping is not None]
        return [Slice(index, int(address.start), int(address.numel)) for index, address in addresses]
    begin, end = rank * total // ranks, (rank + 1) * total // ranks
    slices = []
    for index, offset in enumerate(offsets):
        low, high = max(begin - offset, 0), min(end - offset, _numel(parameters[index]))
        if low < high:
            slices.append(Slice(index, low, high - low))
    return slices


@dataclass(frozen=True)
class _Dealt:
    """A parameter's piece in this rank's partition."""

    group: int
    number: int  # in the partition
    parameter: Any
    start: int  # first element of the parameter
    numel: int
    begin: int  # first element of the partition


def _dealt(optimizer: Any) -> Iterator[_Dealt]:
    """What this rank owns under ``round_robin_gradients``: ``params_in_partition``, one after the other.

    The first begins at its element ``first_offset``, the last ends with the partition, ``partition_size`` elements.
    """
    for group, parameters in enumerate(optimizer.params_in_partition):
        begin = 0
        for number, parameter in enumerate(parameters):
            start = int(optimizer.first_offset[group]) if number == 0 else 0
            numel = min(parameter.numel() - start, int(optimizer.partition_size[group]) - begin)
            yield _Dealt(group, number, parameter, start, numel, begin)
            begin += numel


_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # ds_id -> shard of the gradient


def _whole_on_every_rank(engine: Any) -> bool:
    """Whether each rank holds the whole aggregated gradient after the reduction."""
    # 0.17.6 to 0.18.3 give stage 1 with grad_accum_dtype an FP16_UnfusedOptimizer, as stage 0 has
    return not isinstance(engine.optimizer, ZeROOptimizer) or isinstance(engine.optimizer, BF16_Optimizer)


def aggregated_gradients(engine: Any, parameters: list[Any], share: list[Slice] | None) -> Iterator[Part] | None:
    """This rank's share of the aggregated gradient; valid between the boundary's backward and the optimizer step.

    * Stage 0 and ``BF16_Optimizer``: where gradients accumulate, the reduction puts its result.
    * Stages 1 and 2: ``_hp_mapping.get_lp_grad_fragment``.
    * Stage 3: ``__param_id_to_grad_partition`` of ``DeepSpeedZeroOptimizer_Stage3``.
    """
    if share is None:
        return None
    optimizer = engine.optimizer
    if _whole_on_every_rank(engine):
        held = accumulated_gradients(engine, parameters)
        read: Callable[[Slice], Tensor | None] = lambda piece: _cut(held(piece.index), piece)  # noqa: E731
    elif engine.zero_optimization_stage() == 3:
        shards = getattr(optimizer, _SHARDS)
        read = lambda piece: shards[parameters[piece.index].ds_id].reshape(-1)[: piece.numel]  # noqa: E731
    elif getattr(optimizer, "round_robin_gradients", False):
        averaged = {id(d.parameter): optimizer.averaged_gradients[d.group][d.number] for d in _dealt(optimizer)}
        read = lambda piece: averaged[id(parameters[piece.index])].reshape(-1)[: piece.numel]  # noqa: E731
    else:
        read = lambda piece: _fragment(parameters[piece.index], piece.numel)  # noqa: E731
    return ((piece.index, piece.start, values) for piece in share if (values := read(piece)) is not None)


def _cut(values: Tensor | None, piece: Slice) -> Tensor | None:
    return None if values is None else values.detach().reshape(-1)[piece.start : piece.start + piece.numel]


def _fragment(parameter: Any, numel: int) -> Tensor | None:
    fragment: Tensor | None = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return None if fragment is None else fragment.reshape(-1)[:numel]


# -- what the optimizer applies ----------------------------------------------------------------------------------------

Places = dict[int, list[tuple[Slice, int]]]
"""id of a parameter of the base optimizer -> pieces of model parameters in it, and at which element they begin."""


def base_optimizers(engine: Any) -> list[Any]:
    """The torch optimizers that really step. ZeRO-3's offload has a second one, for what stays on the device."""
    found = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if optimizer is not None]


def applied_places(engine: Any, parameters: list[Tensor], share: list[Slice] | None) -> Places | None:
    """Where this rank's share of the gradient lies when the base optimizer steps; None where a wrapper hides it.

    * no wrapper: the model's own parameters;
    * ``FP16_UnfusedOptimizer``: ``fp32_groups`` beside ``fp16_groups``;
    * ``FP16_Optimizer``: ``fp32_groups_flat``, the group's parameters one after the other;
    * ``BF16_Optimizer``: ``fp32_groups_flat_partition``; stages 1 and 2: ``single_partition_of_fp32_groups``; in both
      ``_hp_mapping.hp_fragment_address`` says where;
    * stage 3: ``fp32_partitioned_groups_flat`` beside ``fp16_groups``, shards one after the other.

    Muon changes the gradient before it reaches the optimizer, so there is nothing to compare.
    """
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    if share is None or not hasattr(basic, "register_step_pre_hook") or "muon" in type(basic).__name__.lower():
        return None
    pieces = {piece.index: piece for piece in share}
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    places: Places = {}

    def put(flat: Any, parameter: Any, begin: int) -> None:
        piece = pieces.get(index_of.get(id(parameter), -1))
        if piece is not None:
            places.setdefault(id(flat), []).append((piece, begin))

    if engine.zero_optimization_stage() == 3:
        if getattr(optimizer, "swap_optimizer", False):
            return None
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            begin = 0
            for parameter in group:
                put(flat, parameter, begin)
                begin += parameter.partition_numel()
    elif isinstance(optimizer, ZeROOptimizer):
        names = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        flats = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
        groups = getattr(optimizer, "bf16_groups", None) or getattr(optimizer, "bit16_groups", None)
        if flats is None or groups is None:
            return None
        if getattr(optimizer, "round_robin_gradients", False):
            for dealt in _dealt(optimizer):
                put(flats[dealt.group], dealt.parameter, dealt.begin)
            return places
        for flat, group in zip(flats, groups, strict=True):
            for parameter in group:
                if getattr(parameter, "_hp_mapping", None) is not None:
                    put(flat, parameter, int(parameter._hp_mapping.hp_fragment_address.start))
    elif hasattr(optimizer, "fp32_groups_flat"):
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            begin = 0
            for parameter in group:
                piece = pieces.get(index_of.get(id(parameter), -1))
                put(flat, parameter, begin + (piece.start if piece is not None else 0))
                begin += parameter.numel()
    else:
        pairs = [(parameter, parameter) for parameter in parameters]
        if hasattr(optimizer, "fp32_groups"):
            groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
            pairs = [pair for masters, models in groups for pair in zip(masters, models, strict=True)]
        for master, parameter in pairs:
            piece = pieces.get(index_of.get(id(parameter), -1))
            put(master, parameter, piece.start if piece is not None else 0)
    return places


def applied_gradients(optimizer: Any, places: Places) -> Iterator[Part]:
    """What a base optimizer holds as gradients right now, of this rank's share."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            for piece, begin in places.get(id(parameter), ()) if gradient is not None else ():
                yield piece.index, piece.start, gradient.detach().reshape(-1)[begin : begin + piece.numel]


# -- arithmetic and replicas -----------------------------------------------------------------------------------


def arithmetic_of(engine: Any, elements: int, width: int, reductions: int, ranks: int) -> Arithmetic:
    """What the reduction rounds, and not less.

    ``engine.communication_data_type`` (fp16 and bf16 trainings: their own, else fp32) is what stage 0 casts to;
    ZeRO's optimizers have their own attribute of this name. A cast to a wider dtype and a factor that is a power of
    two are exact; ``prescale_gradients`` scales before and after the sum.
    """
    optimizer = engine.optimizer
    communication = getattr(optimizer, "communication_data_type", None) or engine.communication_data_type
    own = next((p.dtype for p in engine.module.parameters() if p.requires_grad), torch.float32)
    kept = _kept_dtype(engine, own)
    # where bf16 gradients accumulate in fp32 before the reduction, it is fp32 that is reduced
    local = kept if _whole_on_every_rank(engine) or getattr(optimizer, "use_grad_accum_attribute", False) else own
    factors = [float(engine.gradient_predivide_factor()), float(ranks)]
    scaled = any(not math.log2(factor).is_integer() for factor in factors)
    after = [communication] if scaled and engine.postscale_gradients() else []
    applied = kept if isinstance(optimizer, BF16_Optimizer) else torch.float32
    return Arithmetic(
        communication,
        before=_narrows(local, communication) + scaled,
        after=(*after, *([kept] if _narrows(communication, kept) else [])),
        reductions=reductions,
        accumulation=kept,
        applied=applied,
        norm=kept,
        elements=elements,
        width=width,
    )


def _kept_dtype(engine: Any, own: torch.dtype) -> torch.dtype:
    """In which the aggregated gradient is kept.

    ``grad_acc_dtype`` of ``BF16_Optimizer``; ZeRO's ``gradient_accumulation_dtype``, which in stages 1 and 2 counts
    only where ``use_grad_accum_attribute`` is set; else the parameters' own.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return getattr(optimizer, "grad_acc_dtype", None) or own
    if engine.zero_optimization_stage() == 3 or getattr(optimizer, "use_grad_accum_attribute", False):
        return getattr(optimizer, "gradient_accumulation_dtype", None) or own
    return own


def _narrows(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a cast may round; also where the two have different ranges."""
    return wide != narrow and torch.promote_types(wide, narrow) != narrow


def replicated_parameters(engine: Any) -> Items:
    """Every parameter, trainable or not, where each rank holds all of it; nothing under stage 3."""
    if engine.zero_optimization_stage() == 3:
        return []
    return [(name, parameter) for name, parameter in engine.module.named_parameters()]


def replicated_state(engine: Any) -> Items:
    """Buffers, and in stage 0 without partitions the optimizer's tensors and its fp32 masters."""
    if engine.zero_optimization_stage() == 3:
        return []
    found = [(f"buffer {name}", buffer) for name, buffer in engine.module.named_buffers()]
    if engine.zero_optimization_stage() > 0 or isinstance(engine.optimizer, BF16_Optimizer):
        return found
    basic = engine.basic_optimizer
    own = {id(parameter) for parameter in engine.module.parameters()}
    for g, group in enumerate(getattr(basic, "param_groups", ())):
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                found.append((f"master weights {g}.{p}", parameter))
            for key, value in basic.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found.append((f"optimizer {key} {g}.{p}", value))
    return found


def _numel(parameter: Any) -> int:
    """Elements of the whole parameter; under ZeRO-3 the tensor itself is empty and ``ds_numel`` knows."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
