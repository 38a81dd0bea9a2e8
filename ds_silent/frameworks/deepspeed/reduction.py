"""Where DeepSpeed's optimizers keep a gradient: as it accumulates, aggregated, and as it is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from ds_silent.capture.local_gradient import Accumulated
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.framework import Part
from ds_silent.frameworks.deepspeed.state import Shape, numel_of
from ds_silent.frameworks.torch_common import Slice, contains, cut, nth_share, row_of
from ds_silent.patches import Patches


def reduces_what_accumulates(engine: Any) -> bool:
    """Tell whether ``parameter.grad`` holds the gradient of all the step's micro-batches behind its last backward.

    So it is in stage 0, and in stage 1 without ``overlap_comm`` (0.16.9 to 0.19.8).
    """
    optimizer = engine.optimizer
    elsewhere = isinstance(optimizer, BF16_Optimizer) or getattr(optimizer, "use_grad_accum_attribute", False)
    overlaps = engine.zero_optimization_stage() > 0 and engine.zero_overlap_comm()
    return not (elsewhere or overlaps or engine.zero_optimization_partition_gradients())


def accumulated_gradients(engine: Any, parameters: list[Tensor]) -> Accumulated:
    """Find where a parameter's gradient of the step's earlier micro-batches lies, in stages 0 and 1.

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


def share_of(engine: Any, parameters: list[Tensor], shape: Shape) -> list[Slice] | None:
    """Return what of the gradient this rank answers for; the ranks' shares make up the whole. None where it is hidden.

    * Stage 0 holds all of it on every rank: each rank takes an N-th. Of experts those that have the same.
    * ``BF16_Optimizer`` does too, but its optimizer is partitioned: the partition, by ``parameter._hp_mapping``.
    * Stages 1 and 2: what this rank owns, by ``parameter._hp_mapping`` (``deepspeed/utils/tensor_fragment.py``);
      with ``round_robin_gradients`` that speaks of the order before (0.16.9 to 0.19.8), see :func:`_dealt`.
    * Stage 3: this rank's shard, of what the optimizer has got.
    """
    if not shape.answers:
        return []
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    rank, ranks = shape.reduced
    if stage == 3:
        if ranks != getattr(optimizer, "partition_count", None) or not hasattr(optimizer, _SHARDS):
            return None
        shards, kept = [], getattr(optimizer, _SHARDS)
        for index, parameter in enumerate(parameters):
            if kept and parameter.ds_id not in kept:  # type: ignore[attr-defined]
                return None  # trainable, and in no parameter group: nobody reduces its gradient
            size: int = parameter.partition_numel()  # type: ignore[attr-defined]  # set by DeepSpeed
            shards.append(Slice(index, rank * size, min(size, numel_of(parameter) - rank * size)))
        return [shard for shard in shards if shard.numel > 0]
    if isinstance(optimizer, ZeROOptimizer):
        if not all(hasattr(parameter, "_hp_mapping") for parameter in parameters):
            return None
        if getattr(optimizer, "round_robin_gradients", False):
            if optimizer.cpu_offload:
                return None
            index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
            return [Slice(index_of[id(d.parameter)], d.start, d.numel) for d in pieces_dealt(optimizer)]
        mappings = ((index, parameter._hp_mapping) for index, parameter in enumerate(parameters))  # type: ignore[attr-defined]
        addresses = [(index, mapping.lp_fragment_address) for index, mapping in mappings if mapping is not None]
        return [Slice(index, int(address.start), int(address.numel)) for index, address in addresses]
    places = [shape.aggregate_of(parameter) for parameter in parameters]
    shares = []
    for place in dict.fromkeys(places):
        own = [numel_of(p) if other == place else 0 for p, other in zip(parameters, places, strict=True)]
        shares += nth_share(own, *place, [row_of(p) for p in parameters])
    return shares


@dataclass(frozen=True)
class _Dealt:
    """A parameter's piece in this rank's partition."""

    group: int
    number: int  # in the partition
    parameter: Any
    start: int  # first element of the parameter
    numel: int
    begin: int  # first element of the partition


def pieces_dealt(optimizer: Any) -> Iterator[_Dealt]:
    """Yield what this rank owns under ``round_robin_gradients``: ``params_in_partition``, one after the other.

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


def whole_on_every_rank(engine: Any) -> bool:
    """Tell whether each rank holds the whole aggregated gradient after the reduction."""
    # 0.17.6 to 0.18.3 give stage 1 with grad_accum_dtype an FP16_UnfusedOptimizer, as stage 0 has
    return not isinstance(engine.optimizer, ZeROOptimizer) or isinstance(engine.optimizer, BF16_Optimizer)


def reduced_after_backward(engine: Any) -> bool:
    """Tell whether the aggregated gradient is there when the boundary's ``engine.backward`` returns.

    Every stage ends its reduction in ``allreduce_gradients`` and waits for it, with ``overlap_comm`` too
    (``independent_gradient_partition_epilogue``, 0.16.9 to 0.19.8). Copies to the host are only waited for in the step.
    """
    optimizer = engine.optimizer
    return not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def aggregated_gradients(engine: Any, parameters: list[Any], share: list[Slice] | None) -> Iterator[Part] | None:
    """Return this rank's share of the aggregated gradient; valid from the boundary's backward to the optimizer step.

    * Stage 0 and ``BF16_Optimizer``: where gradients accumulate, the reduction puts its result.
    * Stages 1 and 2: ``_hp_mapping.get_lp_grad_fragment``.
    * Stage 3: ``__param_id_to_grad_partition`` of ``DeepSpeedZeroOptimizer_Stage3``.
    """
    if share is None:
        return None
    read = _reader(engine, parameters)
    return ((piece.index, piece.start, values) for piece in share if (values := read(piece)) is not None)


def _reader(engine: Any, parameters: list[Any]) -> Callable[[Slice], Tensor | None]:
    """Find where a slice of the aggregated gradient lies."""
    optimizer = engine.optimizer
    if whole_on_every_rank(engine):
        held = accumulated_gradients(engine, parameters)
        return lambda piece: cut(held(piece.index), piece)
    if engine.zero_optimization_stage() == 3:
        shards = getattr(optimizer, _SHARDS)
        return lambda piece: _begin(shards.get(parameters[piece.index].ds_id), piece.numel)
    if getattr(optimizer, "round_robin_gradients", False):
        groups = optimizer.averaged_gradients
        dealt = [d for d in pieces_dealt(optimizer) if groups.get(d.group) is not None]
        averaged = {id(d.parameter): groups[d.group][d.number] for d in dealt}
        return lambda piece: _begin(averaged.get(id(parameters[piece.index])), piece.numel)
    return lambda piece: _fragment(parameters[piece.index], piece.numel)


def _begin(values: Tensor | None, numel: int) -> Tensor | None:
    return None if values is None else values.reshape(-1)[:numel]


def _fragment(parameter: Any, numel: int) -> Tensor | None:
    """None where the script has cleared the gradients: a part of the aggregate is missing then, and is told so."""
    mapping = parameter._hp_mapping
    held = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict  # 0.16.9 to 0.19.8
    if held.get(mapping.param_group_index) is None:  # get_lp_grad_fragment raises then
        return None
    return _begin(mapping.get_lp_grad_fragment(parameter._index_in_param_group), numel)


class LeftGradients:
    """Drop what another model's backward has left in this one's ``grad``, where the script clears it before its own.

    So a discriminator's, through which its generator is trained. Only where gradients stay in ``grad``: stages 1 to 3
    have taken it into their reduction by then.
    """

    def __init__(self, engine: Any, patches: Patches, guard: CollectiveGuard, drop: Callable[[], object]):
        """``drop``: forgets the gradients that have come in the step under way, if there are any."""
        self._engine, self._guard, self._drop = engine, guard, drop
        self._own = False  # a backward of the engine's own has begun in this step
        if isinstance(engine.optimizer, ZeROOptimizer):
            return
        for name in ("backward", "allreduce_gradients"):
            patches.around(engine, name, partial(guard.local, self._begins))
        patches.around(engine, "_take_model_step", None, partial(guard.local, self._stepped))
        clearing = {id(one): one for one in (engine, engine.optimizer, *base_optimizers(engine))}
        for one in [one for one in clearing.values() if hasattr(one, "zero_grad")]:
            patches.around(one, "zero_grad", partial(guard.run, self._clears))
        patches.wrap_method(nn.Module, "zero_grad", self._module_clears)

    def _begins(self, *args: Any, **kwargs: Any) -> None:
        self._own = True

    def _stepped(self) -> None:
        self._own = False

    def _clears(self, *args: Any, **kwargs: Any) -> None:
        if not self._own:
            self._drop()

    def _module_clears(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._guard.run(self._clears_of, module)
        return original(module, *args, **kwargs)

    def _clears_of(self, module: nn.Module) -> None:
        if contains(module, self._engine.module):
            self._clears()


# -- A copy of the local gradient from before the reduction, so that the reduction can be repeated --------------------


class KeptGradients:
    """The gradients that go into the reduction of stages 0 and 1, kept until the optimizer has run.

    Takes as much memory as the gradients, from the first step on.
    """

    def __init__(self, engine: Any, parameters: list[Tensor]):
        self._engine, self._parameters = engine, parameters
        self._held = accumulated_gradients(engine, parameters)
        self._in_place = whole_on_every_rank(engine)  # the reduction writes where the gradients accumulate
        self._copies: list[Tensor | None] = [None] * len(parameters)
        self._present = [False] * len(parameters)
        self._reduce = engine.allreduce_gradients  # as it is before the observer follows it
        self._again: Callable[[], object] | None = None

    def keep(self, *args: Any, **kwargs: Any) -> None:
        """Copy the gradients, at the boundary, before the reduction, which is called with these arguments."""
        self._again = partial(self._reduce, *args, **kwargs)
        for index in range(len(self._parameters)):
            gradient = self._held(index)
            self._present[index] = gradient is not None
            if gradient is None:
                continue
            copy = self._copies[index]
            if copy is None or copy.dtype != gradient.dtype:
                self._copies[index] = gradient.detach().clone()
            else:
                copy.copy_(gradient.detach())

    def reduce_again(self) -> int:
        """Reduce the gradients that were kept; return how many bytes they have. A collective."""
        assert self._again is not None
        self._put_back()
        reduce = getattr(self._engine.optimizer, "reduce_gradients", None)
        if reduce is None or self._in_place:
            self._again()
        else:  # stages 1 and 2 have given their buckets back: what pipelines call makes them anew (0.16.9 to 0.19.8)
            reduce(pipeline_parallel=True)
        return sum(
            copy.numel() * copy.element_size()
            for copy, present in zip(self._copies, self._present, strict=True)
            if present and copy is not None
        )

    def _put_back(self) -> None:
        """Leave everything as it was before the reduction, which may then be called again."""
        if self._in_place:
            self._put_back_in_place()
        else:
            self._put_back_freed()

    def _put_back_in_place(self) -> None:
        """Write where stage 0 reduces; it gives zeros to parameters without a gradient."""
        for index, parameter in enumerate(self._parameters):
            gradient, copy = self._held(index), self._copies[index]
            if self._present[index]:
                assert gradient is not None
                assert copy is not None
                gradient.copy_(copy)
            elif gradient is not None and parameter.grad is gradient:
                parameter.grad = None

    def _put_back_freed(self) -> None:
        """``DeepSpeedZeroOptimizer`` of stage 1 frees what it has reduced and keeps ``averaged_gradients`` (0.16.9 to
        0.19.8: a list or a tensor per group, None once the step is over)."""
        optimizer = self._engine.optimizer
        assert isinstance(optimizer, ZeROOptimizer)
        name = "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"
        for index, parameter in enumerate(self._parameters):
            copy = self._copies[index]
            setattr(parameter, name, copy.clone() if self._present[index] and copy is not None else None)
        averaged = optimizer.averaged_gradients
        for group in list(averaged):
            averaged[group] = None


# -- What DeepSpeed's base optimizer is about to apply: unscaled, clipped, in the fp32 masters ------------------------


Places = dict[int, list[tuple[Slice, int]]]
"""id of a parameter of the base optimizer -> pieces of model parameters in it, and at which element they begin."""


def base_optimizers(engine: Any) -> list[Any]:
    """Return the torch optimizers that really step. ZeRO-3's offload has a second, for what stays on the device."""
    found = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if optimizer is not None]


def applied_places(engine: Any, parameters: list[Tensor], share: list[Slice] | None) -> Places | None:
    """Find this rank's share of the gradient as the base optimizer steps; None where a wrapper hides it.

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

    def put(flat: Any, parameter: Any, begin: int, whole: bool = False) -> None:
        """``begin``: of the piece in ``flat``, or of the whole parameter."""
        piece = pieces.get(index_of.get(id(parameter), -1))
        if piece is not None:
            places.setdefault(id(flat), []).append((piece, begin + piece.start if whole else begin))

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
            for dealt in pieces_dealt(optimizer):
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
                put(flat, parameter, begin, whole=True)
                begin += parameter.numel()
    else:
        pairs = [(parameter, parameter) for parameter in parameters]
        if hasattr(optimizer, "fp32_groups"):
            groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
            pairs = [pair for masters, models in groups for pair in zip(masters, models, strict=True)]
        for master, parameter in pairs:
            put(master, parameter, 0, whole=True)
    return places


def applied_gradients(optimizer: Any, places: Places) -> Iterator[Part]:
    """Yield what a base optimizer holds as gradients right now, of this rank's share."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            for piece, begin in places.get(id(parameter), ()) if gradient is not None else ():
                yield piece.index, piece.start, gradient.detach().reshape(-1)[begin : begin + piece.numel]
