"""Give every rank the bits that more than half of the ranks hold. Written only when they have arrived intact.

    found = compare(items, bits, group)
    restore(items, found, group, device)                  # a majority's bits to the ranks outside of it
    still = compare(items, bits, group)                   # only this says that it is repaired

What arrives is checked against the checksum that the majority's own had, before it is written: a broadcast that is
corrupted under way is repeated, never committed; a rank that dies under way leaves every tensor as it was or right.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.parts import majority
from ds_silent.kernels.checksums import Items, checksum
from ds_silent.replicas.compare import Comparison


def restore(items: Items, found: Comparison, group: dist.ProcessGroup, device: torch.device) -> int:
    """Give each tensor that differs the bits that more than half of the ranks hold. A collective.

    A tensor without such a majority is left alone, and so is one whose bits arrive damaged: ``compare`` tells.

    Args:
        items: names and tensors of this rank's replica, in the same order on every rank.
        found: what ``compare`` has said of them.
        device: of the group's buffers; the tensors may lie elsewhere, as step counts do.

    Returns:
        bytes that were broadcast.
    """
    sent = 0
    for place, parts, right in zip(found.apart, found.parts, found.right, strict=True):
        if right is not None:
            sent += _copy_bits(items[place][1], majority(parts), right, group, device)
    return sent


def _copy_bits(
    tensor: Tensor, healthy: tuple[int, ...], expected: int, group: dist.ProcessGroup, device: torch.device
) -> int:
    """Broadcast from the first healthy rank; written where the rank is not one of them and the bits are intact."""
    me, size = dist.get_rank(group), tensor.numel() * tensor.element_size()
    wire = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    if me == healthy[0]:
        wire.view(torch.uint8)[:size].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    dist.broadcast(wire, src=dist.get_global_rank(group, healthy[0]), group=group)
    if me not in healthy:
        arrived = wire.view(torch.uint8)[:size].view(tensor.dtype).view(tensor.shape)
        if int(checksum(arrived)) == expected:
            with torch.no_grad():
                tensor.copy_(arrived)
    return wire.numel() * 4
