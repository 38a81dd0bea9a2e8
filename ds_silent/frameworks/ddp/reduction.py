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
_WHOLE = ("", "allreduce_hook", "ALLREDUCE")


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
    return hook_of(ddp) in (*_WHOLE, *_NARROW)


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
