"""What reduces gradients where they cannot be seen is refused with a sentence, the same on every rank.

A configuration is judged without DeepSpeed, an engine with it. A block that nothing reads is reported here too.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.config.block_file import load_ds_config, section, switched_on, zero_section
from ds_silent.extras import is_first
from ds_silent.frameworks.deepspeed.state import is_pipeline, shape_of
from ds_silent.observing.start import refuse_sparse_gradients, refuse_too_few_ranks
from ds_silent.text import shown

logger = logging.getLogger("ds_silent")
ONE_BIT_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def refuse_unsupported_config(ds_config: Mapping[str, Any], config: SilentConsistencyConfig | None = None) -> None:
    """Raise :class:`ConfigError` for what reduces gradients where they cannot be seen; equal on all ranks.

    Args:
        ds_config: all of it.
        config: its parsed block; with it, responses that make no sense under this ZeRO stage are refused too.
    """
    zero = zero_section(ds_config)
    optimizer = str(section(ds_config, "optimizer").get("type", ""))
    found = None
    if switched_on(section(ds_config, "compile"), "deepcompile"):
        found = "compile.deepcompile true (it reduces gradients inside the compiled graph)"
    elif zero.get("zenflow"):
        found = "zero_optimization.zenflow (it applies parts of the gradient at different steps)"
    elif switched_on(section(zero, "offload_optimizer"), "super_offload"):
        found = "zero_optimization.offload_optimizer.super_offload true (it applies gradients during the backward)"
    elif re.sub(r"[^a-z0-9]", "", optimizer.lower()) in ONE_BIT_OPTIMIZERS:
        found = f"optimizer.type {optimizer} (it communicates compressed momentum, not gradients)"
    elif ds_config.get("sparse_gradients"):
        found = "sparse_gradients true (they are gathered, not reduced)"
    elif switched_on(section(ds_config, "expert_parallel"), "enabled"):
        found = "expert_parallel.enabled true (AutoEP has not been tried)"
    if found:
        raise ConfigError(
            f'silent_consistency cannot observe {found}; remove it, or set "silent_consistency": {{"enabled": false}}'
        )
    if config is not None:
        if zero.get("zero_quantized_gradients") and config.integrity.aggregation:
            raise ConfigError(
                "zero_optimization.zero_quantized_gradients true rounds gradients to a few bits on their way, which no "
                f'bound on rounding covers; set "{BLOCK}": {{"integrity": {{"aggregation": false}}}} or remove it'
            )
        _refuse_responses(zero, config)
        if config.reduction == "ordered":
            _refuse_ordered(ds_config, zero)


def _refuse_responses(zero: Mapping[str, Any], config: SilentConsistencyConfig) -> None:
    """Refuse responses without anything to repair from: a second reduction, or a second replica."""
    stage, respond, resync = zero.get("stage", 0), config.respond, config.resync
    if stage and (respond.on_replica_drift in ("majority", "mean") or resync.mode != "off"):
        key = f'respond.on_replica_drift "{respond.on_replica_drift}"'
        if resync.mode != "off":
            key = f'resync.mode "{resync.mode}"'
        why = "has one owner per shard of the optimizer's state, so that there is no second copy to repair from"
        raise ConfigError(
            f"{BLOCK}.{key} needs a full replica on every rank, but ZeRO stage {stage} {why}; use stage "
            '0, or respond.on_replica_drift "report" or "stop"'
        )
    if stage == 3 and respond.on_replica_drift == "stop":
        raise ConfigError(
            f'{BLOCK}.respond.on_replica_drift "stop" compares replicas, and ZeRO stage 3 has none; use "report", and '
            'respond.on_aggregation_error "stop" against wrong reductions'
        )
    if respond.on_aggregation_error == "retry":
        found = None
        if stage in (2, 3):
            found = f"ZeRO stage {stage} reduces and frees every micro-batch's gradient"
        elif stage == 1 and zero.get("overlap_comm"):
            found = "ZeRO stage 1 with overlap_comm true reduces during the last backward"
        elif stage == 1 and zero.get("offload_optimizer"):
            found = "ZeRO stage 1 with offload_optimizer moves gradients to the host while it reduces"
        if found is not None:
            raise ConfigError(
                f'{BLOCK}.respond.on_aggregation_error "retry" must reduce a step\'s gradients again, but {found}; use '
                'stage 0 or 1 without it, or respond.on_aggregation_error "stop"'
            )


def _refuse_ordered(ds_config: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Refuse what does not let each micro-batch's gradient be taken away and the mean put back."""
    stage = zero.get("stage", 0)
    offload = zero.get("offload_optimizer")
    offloads = isinstance(offload, Mapping) and offload.get("device", "none") != "none"
    accumulation = section(ds_config, "data_types").get("grad_accum_dtype")
    steps = ds_config.get("gradient_accumulation_steps")
    if stage in (2, 3):
        _not_ordered(f"ZeRO stage {stage}", "it reduces and frees gradients during the backward", "use stage 0 or 1")
    if stage == 1 and zero.get("overlap_comm"):
        why = "under stage 1 it reduces during the last backward"
        _not_ordered("zero_optimization.overlap_comm true", why, "set it to false")
    if stage == 1 and offloads:
        why = "it moves gradients to the host while it reduces"
        _not_ordered("zero_optimization.offload_optimizer", why, "leave it out")
    if stage == 1 and zero.get("round_robin_gradients"):
        why = "it deals gradients to ranks in another order than their optimizer states"
        _not_ordered("zero_optimization.round_robin_gradients true", why, "set it to false")
    if accumulation is not None:
        why = "DeepSpeed then accumulates in a room of its own"
        remedy = "leave it out: an ordered reduction adds up in fp32 anyway"
        _not_ordered(f"data_types.grad_accum_dtype {shown(accumulation)}", why, remedy)
    if switched_on(section(ds_config, "fp16"), "enabled"):
        _not_ordered("fp16.enabled true", "loss scales differ between the runs to be compared", "use bf16 or fp32")
    if switched_on(section(ds_config, "torch_autocast"), "enabled"):
        why = "gradients of several dtypes have not been tried"
        _not_ordered("torch_autocast.enabled true", why, "use bf16.enabled or fp32")
    if str(ds_config.get("gradient_allreduce_op", "mean")).lower() == "sum":
        remedy = "leave it out, and divide the loss by one rank's share instead"
        _not_ordered('gradient_allreduce_op "sum"', "an ordered reduction is a mean", remedy)
    if ds_config.get("managed_gradient_accumulation") is False:
        why = "micro-batches are then added up before they can be taken apart"
        _not_ordered("managed_gradient_accumulation false", why, "leave it out")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        _refuse_accumulation(steps)


def _refuse_accumulation(steps: int) -> None:
    if steps & (steps - 1):
        why = "a rank's micro-batches must be a whole subtree of the tree by which all are added up"
        lower = 1 << steps.bit_length() - 1
        remedy = f"use a power of two, such as {lower} or {2 * lower}"
        _not_ordered(f"gradient_accumulation_steps {steps}", why, remedy)


def _not_ordered(found: str, why: str, remedy: str) -> None:
    raise ConfigError(f'{BLOCK}.reduction "ordered" does not work with {found}, because {why}; {remedy}, or "native"')


def _refuse_ordered_engine(engine: Any) -> None:
    """Refuse what only the engine knows: values that were derived, and the optimizer that DeepSpeed has chosen."""
    import deepspeed
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    _refuse_accumulation(int(engine.gradient_accumulation_steps()))
    optimizer, basic = engine.optimizer, getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, BF16_Optimizer) or getattr(optimizer, "use_grad_accum_attribute", False):
        why = f"DeepSpeed {deepspeed.__version__} accumulates in a room of its own under it"
        _not_ordered(f"the optimizer wrapper {type(optimizer).__name__}", why, "use fp32")
    if getattr(optimizer, "cpu_offload", False):  # also by the old key zero_optimization.cpu_offload
        _not_ordered("an optimizer on the host", "it moves gradients there while it reduces", "leave the offload out")
    if "muon" in type(basic).__name__.lower():
        why = "it changes gradients while they are reduced"
        _not_ordered(f"the optimizer {type(basic).__name__}", why, "use another one")


def has_optimizer(engine: Any) -> bool:
    """Tell whether the engine takes steps: it asks the same of itself (0.16.9 to 0.19.8, ``__init__``)."""
    return engine.client_optimizer is not None or bool(engine.optimizer_name())


def _refuse_shape(engine: Any, config: SilentConsistencyConfig) -> None:
    """Combinations of parallelism that have not been tried, and responses, which a data-parallel group alone cannot
    give where others share its steps."""
    shape, stage = shape_of(engine), int(engine.zero_optimization_stage())
    pipeline, experts = is_pipeline(engine), bool(engine.has_moe_layers)
    split = "sequence parallelism" if shape.sequence > 1 else "tensor parallelism" if shape.tensor[1] > 1 else ""
    found, why = "", ""
    if pipeline and type(engine).__name__ != "PipelineEngine":
        found, why = type(engine).__name__, "its schedule reduces gradients in another order"
    elif pipeline and int(engine.grid.get_slice_parallel_world_size()) > 1:
        found, why = "pipeline parallelism with tensor parallelism", "that has not been tried"
    elif pipeline and engine.fp16_enabled():
        found, why = "fp16.enabled true with pipeline parallelism", "only the last stage knows the loss scale"
    elif experts and (pipeline or split):
        other = "pipeline parallelism" if pipeline else split
        found, why = f"mixture-of-experts layers with {other}", "that has not been tried"
    elif shape.sequence > 1 and engine.mp_world_size > 1:
        found, why = "sequence parallelism with tensor parallelism", "that has not been tried"
    elif stage == 3 and (experts or split == "tensor parallelism"):
        found = f"{'mixture-of-experts layers' if experts else split} under ZeRO stage 3"
        why = "that has not been tried"
    if found:
        raise ConfigError(
            f'silent_consistency cannot observe {found}, because {why}; set "{BLOCK}": {{"enabled": false}}'
        )
    kind = "pipeline parallelism" if pipeline else split or ("mixture-of-experts layers" if shape.experts else "")
    respond = config.respond
    changes = {
        f'respond.on_aggregation_error "{respond.on_aggregation_error}"': respond.on_aggregation_error != "report",
        f'respond.on_replica_drift "{respond.on_replica_drift}"': respond.on_replica_drift != "report",
        f'resync.mode "{config.resync.mode}"': config.resync.mode != "off",
        f'reduction "{config.reduction}"': config.reduction != "native",
    }
    asked = next((key for key, changed in changes.items() if changed), None)
    if kind and asked:
        raise ConfigError(
            f"{BLOCK}.{asked} does not work with {kind}, where other ranks take part in every step; leave it at its "
            "default, which reports"
        )


def refuse_unsupported_engine(engine: Any, config: SilentConsistencyConfig) -> None:
    """Raise :class:`ConfigError` for what its ranks cannot do; equal on all ranks."""
    refuse_too_few_ranks(config, int(engine.seq_dp_world_size))
    refuse_sparse_gradients(engine.module)
    _refuse_shape(engine, config)
    if config.reduction == "ordered":
        _refuse_ordered_engine(engine)


# -- a block that nothing reads: DeepSpeed keeps a key that it does not know, without a word --------------------------


def say_if_a_block_is_not_read() -> None:
    """Look at the configuration of every engine that a script makes by ``deepspeed.initialize`` from now on."""
    import deepspeed

    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        try:
            _look_at(made[0])
        except Exception as error:  # another DeepSpeed
            logger.debug("ds_silent: this engine's ds_config is not looked at: %s", error)
        return made

    deepspeed.initialize = initialize


def _look_at(engine: Any) -> None:
    if engine.config is None or not is_first() or not has_optimizer(engine):
        return
    try:
        block = parse(load_ds_config(engine.config))
    except ConfigError as error:
        logger.warning("ds_silent: %s", error)
        return
    if block is None:
        return

    def forward_begins(module: Any, inputs: Any) -> None:
        from ds_silent.observing.observe import observer_of

        if not (torch.is_grad_enabled() and module.training):
            return
        handle.remove()
        if observer_of(module) is None:
            logger.warning(
                "ds_silent: the ds_config has a %s block, and nothing observes its engine, because DeepSpeed does not "
                "read the block; call ds_silent.initialize instead of deepspeed.initialize, or start the unchanged "
                "script with deepspeed --module ds_silent train.py",
                BLOCK,
            )

    handle = engine.register_forward_pre_hook(forward_begins)
