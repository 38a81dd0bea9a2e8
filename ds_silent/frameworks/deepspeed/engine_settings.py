"""Which settings a DeepSpeed engine runs with, and in which dtypes it reduces, keeps and scales a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_silent.config.block_file import load_ds_config
from ds_silent.framework import Setting
from ds_silent.frameworks.deepspeed.reduction import whole_on_every_rank
from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF, Arithmetic

_ASKED = {
    "gradient_clipping": ("gradient_clipping", "gradient_clipping"),
    "micro-batches of a step": ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
    "zero_optimization.stage": ("zero_optimization_stage", "zero_optimization.stage"),
    "zero_optimization.reduce_bucket_size": ("zero_reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
    "zero_optimization.allgather_bucket_size": (
        "zero_allgather_bucket_size",
        "zero_optimization.allgather_bucket_size",
    ),
    "zero_optimization.overlap_comm": ("zero_overlap_comm", "zero_optimization.overlap_comm"),
    "zero_optimization.contiguous_gradients": (
        "zero_contiguous_gradients",
        "zero_optimization.contiguous_gradients",
    ),
    "prescale_gradients": ("postscale_gradients", "prescale_gradients"),
    "gradient_predivide_factor": ("gradient_predivide_factor", "gradient_predivide_factor"),
}
"""Name: the engine's method (0.16.9 to 0.19.8), and the key of the configuration."""


def settings_of(engine: Any) -> dict[str, Setting]:
    """Return the engine's settings; "yours" where the configuration has the key."""
    config = load_ds_config(engine.config) if engine.config is not None else {}
    found = {}
    for name, (method, key) in _ASKED.items():
        if callable(ask := getattr(engine, method, None)):
            value = ask()
            value = not value if name == "prescale_gradients" else value
            found[name] = Setting(value, "yours" if _stands(config, key) else "default")
    communication = str(engine.communication_data_type).removeprefix("torch.")
    given = _stands(config, "communication_data_type")
    found["communication_data_type"] = Setting(communication, "yours" if given else "framework")
    masters = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # of stage 3, whose groups are empty here
    if masters:
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in masters})
        found["precision of what the optimizer steps"] = Setting(", ".join(dtypes), "framework")
    scale = getattr(engine.optimizer, "loss_scale", None)
    if engine.fp16_enabled() and isinstance(scale, (int, float)):
        given = _stands(config, "fp16.loss_scale") or _stands(config, "fp16.initial_scale_power")
        found["loss scale at the start"] = Setting(float(scale), "yours" if given else "default")
    return found


def _stands(config: Mapping[str, Any], key: str) -> bool:
    """Tell whether a dotted key stands in a configuration with a value of the user's own; "auto" is none."""
    held: Any = config
    for part in key.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = held[part]
    return bool(held != "auto")


def arithmetic_of(
    engine: Any, elements: int, width: int, reductions: int, ranks: int, ordered: bool = False, sequence: int = 1
) -> Arithmetic:
    """Return what the reduction rounds, and not less.

    ``engine.communication_data_type`` (fp16 and bf16 trainings: their own, else fp32) is what stage 0 casts to;
    ZeRO's optimizers have their own, for each parameter. A cast to a wider dtype and a factor that is a power of two
    are exact; ``prescale_gradients`` scales before the sum, ``gradient_predivide_factor`` before and after it, and
    ``gradient_allreduce_op "sum"`` not at all. With ``sequence`` ranks to a row the sum is divided by N / sequence, but
    by N where stage 3 scatters it (0.16.9 to 0.19.8). An ``ordered`` reduction adds up in fp32, divides once, and
    rounds once to the gradient's own dtype.
    """
    optimizer = engine.optimizer
    communication = _travelling(engine)
    own = next((p.dtype for p in engine.module.parameters() if p.requires_grad), torch.float32)
    kept = _kept_dtype(engine, own)
    # where bf16 gradients accumulate in fp32 before the reduction, it is fp32 that is reduced
    local = kept if whole_on_every_rank(engine) or getattr(optimizer, "use_grad_accum_attribute", False) else own
    summed = _sums(engine)
    if engine.zero_optimization_stage() == 3 and (
        engine.zero_reduce_scatter() or not engine.zero_contiguous_gradients()
    ):
        sequence = 1
    factors = [] if summed else [float(engine.gradient_predivide_factor()), ranks / sequence]
    scaled = sum(not math.log2(factor).is_integer() for factor in factors)
    after = [communication] if scaled and engine.postscale_gradients() else []
    before = _narrows(local, communication) + scaled
    if ordered:
        communication, before = torch.float32, 0
        after = [] if math.log2(ranks).is_integer() else [communication]
    # without fp32 masters, as for a bf16 model without a "bf16" block, clipping rounds to the parameters' own dtype
    masters = isinstance(optimizer, ZeROOptimizer) or any(
        hasattr(optimizer, n) for n in ("fp32_groups", "fp32_groups_flat")
    )
    applied = kept if isinstance(optimizer, BF16_Optimizer) or not masters else torch.float32
    return Arithmetic(
        communication,
        before=before,
        after=(*after, *([kept] if _narrows(communication, kept) else [])),
        reductions=reductions,
        accumulation=kept,
        applied=applied,
        norm=kept,
        elements=elements,
        width=width,
        total=float(ranks if summed else sequence),
    )


def _sums(engine: Any) -> bool:
    """Tell whether the user asked for sums: ``gradient_allreduce_op`` (since 0.19) of the configuration as given.

    Not ``gradient_average`` of the engine and of ZeRO's optimizers, which is what their reductions go by.
    """
    config = load_ds_config(engine.config) if engine.config is not None else {}
    return str(config.get("gradient_allreduce_op", "mean")).lower() == "sum"


def _travelling(engine: Any) -> torch.dtype:
    """Return the coarsest dtype in which gradients are added up.

    Stages 1 to 3 ask ``get_param_comm_dtype`` for each parameter: under ``torch_autocast`` the weights of
    ``lower_precision_safe_modules`` travel in its dtype and the others in their own (0.17.1 to 0.19.8). Stage 0 and
    ``BF16_Optimizer`` reduce everything in the engine's ``communication_data_type``, under autocast too.
    """
    optimizer = engine.optimizer
    of_parameter = getattr(optimizer, "get_param_comm_dtype", None)
    if of_parameter is not None and not whole_on_every_rank(engine):
        dtypes = {of_parameter(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
        return max(dtypes, key=UNIT_ROUNDOFF.__getitem__, default=torch.float32)
    whole: torch.dtype = getattr(optimizer, "communication_data_type", None) or engine.communication_data_type
    return whole


def _kept_dtype(engine: Any, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which the aggregated gradient is kept.

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
    """Tell whether a cast may round; also where the two have different ranges."""
    return wide != narrow and torch.promote_types(wide, narrow) != narrow


def scales_loss(engine: Any) -> bool:
    """Whether a loss scale is at work: fp16, autocast's scaler (of the engine in stage 0, else of the optimizer), and
    bf16 in stage 0 of 0.17, whose ``FP16_UnfusedOptimizer`` begins with a dynamic ``cur_scale`` of 2^16."""
    owners = ((engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler"))
    if engine.fp16_enabled() or any(getattr(owner, name, None) for owner, name in owners):
        return True
    return float(getattr(engine.optimizer, "cur_scale", 1.0)) != 1.0
