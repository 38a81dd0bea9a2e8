"""Collectives by themselves: what has another name in another torch, and the rare exchange that everybody waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.ranks.together import Once, at_once

# torch 2.13 renamed the flat all-gather and warns at the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_on_host(mine: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """``mine`` of every rank, stacked, on the host: for the rare exchange that everybody waits for. A collective."""
    own = mine.contiguous()
    everybody = once(lambda: [torch.empty_like(own) for _ in range(dist.get_world_size(group))])
    once(lambda: dist.all_gather(everybody, own, group=group))
    return torch.stack(everybody).cpu()
