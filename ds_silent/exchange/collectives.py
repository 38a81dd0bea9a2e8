"""Collectives by themselves: what has another name in another torch, and the rare exchange that everybody waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.together import Once, at_once

# torch 2.13 renamed the flat all-gather and warns at the old name
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_on_host(mine: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """``mine`` of every rank, stacked, on the host: for the rare exchange that everybody waits for. A collective."""
    own = mine.contiguous()
    everybody = once(lambda: [torch.empty_like(own) for _ in range(dist.get_world_size(group))])
    once(lambda: dist.all_gather(everybody, own, group=group))
    return torch.stack(everybody).cpu()


def same_on_all(mine: Tensor, group: dist.ProcessGroup, once: Once = at_once) -> Tensor:
    """Which of these int32 are the same on every rank: bool, of their shape, on the host. A collective that waits.

    One all-reduce of 8 bytes per number, whatever the number of ranks: the largest x and the largest ~x, which is
    -x - 1 and so the smallest x, without an overflow. They meet where all are equal.
    """
    own = mine.contiguous().reshape(-1)
    both = once(lambda: torch.cat((own, ~own)))  # played again, the buffer that was reduced
    once(lambda: dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group))
    largest, smallest = both.cpu().chunk(2)
    return (largest == ~smallest).view(mine.shape)
