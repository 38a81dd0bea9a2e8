"""Megatron-core asks for CUDA by name in a few places: here they are answered with the CPU.

with on_cpu():
    parallel_state.initialize_model_parallel(2)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _CPU(TorchFunctionMode):
    """``device="cuda"`` is the CPU, and a CPU tensor's type is named as CUDA's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(result).replace("torch.", "torch.cuda.")
        return result


@contextmanager
def on_cpu() -> Iterator[None]:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", module="megatron")
    tracker = "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork"  # no dropout, so nothing is drawn
    with (
        patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        patch(tracker, lambda *_: nullcontext()),
        _CPU(),
    ):
        yield
