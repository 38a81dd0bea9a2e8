"""Let Megatron-core train on the CPU, in process groups of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
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
    """Answer with the CPU where Megatron-core asks for CUDA by name."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", module="megatron")
    tracker = "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork"  # no dropout, so nothing is drawn
    with (
        patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        patch(tracker, lambda *_: nullcontext()),
        _CPU(),
    ):
        yield


@contextmanager
def parallel(tensor: int = 1, pipeline: int = 1, virtual: int | None = None, **sizes: int) -> Iterator[None]:
    """Make Megatron's process groups, and its names for the CPU; ``sizes`` of more of them. A collective.

    Megatron only forgets its groups: their threads would go on, and a second training would be slower than the first.
    """
    from megatron.core import parallel_state

    known = dist.distributed_c10d._world.pg_map
    with on_cpu():
        before = list(known)
        parallel_state.initialize_model_parallel(tensor, pipeline, virtual, **sizes)
        made = [group for group in known if group not in before]
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
        dist.barrier()
        for group in made:
            if known.get(group) is not None:  # of others this rank is no member
                dist.destroy_process_group(group)
