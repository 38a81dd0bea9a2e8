"""Every torch.distributed call that ds_silent makes, written down: name, dtype, reduction."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ds_silent.exchange import rows
from ds_silent.ordered import exchange as ordered_exchange

NAMES = (
    *("all_reduce", "all_to_all_single", "broadcast", "all_gather", "reduce_scatter_tensor", "reduce", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "gather", "scatter"),
)
Call = tuple[str, str, str]


def record_collectives() -> list[Call]:
    """From now on, in this process; the list grows as they are called."""
    seen: list[Call] = []

    def recording(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("ds_silent"):
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                seen.extend((name, str(t.dtype), str(kwargs.get("op", "none"))) for t in tensors)
                assert tensors, name
            return original(*args, **kwargs)

        return call

    for name in NAMES:
        setattr(dist, name, recording(name, getattr(dist, name)))
    rows.all_gather = recording("all_gather_into_tensor", rows.all_gather)
    ordered_exchange._all_gather = recording("all_gather_into_tensor", ordered_exchange._all_gather)
    return seen


def check_collectives(ranks: list[list[Call]], names: set[str]) -> None:
    """The same calls in the same order on all ranks, and only what every backend has."""
    assert all(seen == ranks[0] for seen in ranks)
    assert {name for name, _, _ in ranks[0]} == names
    for name, dtype, op in ranks[0]:
        assert dtype in ("torch.float32", "torch.bfloat16", "torch.int32"), name
        assert op in ("none", "RedOpType.SUM", "RedOpType.MIN", "RedOpType.MAX"), name
