"""How a ``DistributedDataParallel`` reduces: in which dtype, and whether what comes out is the mean at all."""

from __future__ import annotations

from typing import Any

import torch

from ds_silent.maths.rounding_bound import Arithmetic, coarsest

_NARROW = {
    "fp16_compress_hook": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "FP16_COMPRESS": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
}
_MARK = "ds_silent"
WHOLE = ("", "allreduce_hook", "ALLREDUCE")


def hook_of(ddp: Any) -> str:
    """Name of the communication hook; empty without one.

    Python hooks stand in ``_comm_hooks``; a built-in one only in the logging data (torch 2.4 to 2.13).
    """
    hooks = getattr(ddp, "_comm_hooks", None) or []
    if hooks:
        hook = hooks[-1][0]
        return str(getattr(hook, "__name__", None) or type(hook).__name__)
    named = ddp._get_ddp_logging_data().get("comm_hook", "") if hasattr(ddp, "_get_ddp_logging_data") else ""
    return str(named).rpartition(".")[2] if named else ""


def keeps_the_mean(ddp: Any) -> bool:
    """Whether what comes out should be the mean but for rounding; hooks of unknown name may be lossy by design."""
    return hook_of(ddp) in (*WHOLE, *_NARROW)


def arithmetic_of(ddp: Any, dtypes: set[torch.dtype], elements: int, width: int) -> Arithmetic:
    """The reducer multiplies by 1/N (which rounds too) and adds up, in the gradients' own dtype or that of a hook.

    ``mixed_precision`` casts parameters and gradients to ``reduce_dtype``, and the result back.
    """
    own = coarsest(dtypes)
    precision = getattr(ddp, "mixed_precision", None)
    narrowed = _NARROW.get(hook_of(ddp)) or getattr(precision, "reduce_dtype", None) or own
    communication = coarsest((own, narrowed))
    return Arithmetic(
        communication,
        before=2 + (communication != own),
        after=(communication, own) if communication != own else (),
        accumulation=own,
        applied=own,
        norm=own,
        elements=elements,
        width=width,
        handed_unscaled=True,
    )


def reduced_parameters(ddp: Any) -> set[int] | None:
    """``id`` of each parameter that lies in a bucket; None where that is not known.

    The reducer keeps the nodes alive that accumulate its parameters' gradients, and keeps the list of them to itself
    (torch 2.4 to 2.13): a node that is the same object a moment later has another owner than this function. That the
    owner is the reducer, and not a graph that the script holds, follows from their number.
    """
    count = ddp._get_ddp_logging_data().get("num_parameter_tensors") if hasattr(ddp, "logger") else None
    parameters = list(ddp.module.parameters())
    try:
        kept = {id(parameter) for parameter in parameters if _accumulated_elsewhere(parameter)}
    except Exception:  # whatever a tensor subclass of somebody else's raises
        kept = set()
    if len(kept) == count:
        return kept
    trainable = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return trainable if len(trainable) == count else None


def _accumulated_elsewhere(parameter: Any) -> bool:
    needed = parameter.requires_grad
    if (
        not parameter.is_leaf
        or parameter.is_inference()
        or not (parameter.is_floating_point() or parameter.is_complex())
    ):
        return False
    parameter.requires_grad_(True)
    try:
        _accumulator(parameter).metadata[_MARK] = True
        return _accumulator(parameter).metadata.pop(_MARK, False) is True
    finally:
        parameter.requires_grad_(needed)


def _accumulator(parameter: Any) -> Any:
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]
