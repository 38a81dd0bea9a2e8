"""Compute exact inner products of the ranks' gradients, where no rank holds more than a chunk of the others'.

    gram = exact_gram(fill, numel, group, device, memory_mb=64)     # (N, N), this rank's part; the parts add up

The long vector is cut into chunks of N pieces. In an all-to-all, rank r receives piece r of every rank's gradient
and computes that piece's N x N inner products: the volume of one reduce-scatter, and never an all-gather of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.guard import unguarded

Fill = Callable[[int, int, Tensor], None]
"""``fill(begin, end, out)`` copies elements begin..end of the long vector into the zeroed fp32 ``out``."""


def exact_gram(
    fill: Fill,
    numel: int,
    group: dist.ProcessGroup,
    device: torch.device,
    memory_mb: int,
    local: Callable[[Callable[[], None]], object] = unguarded,
    collective: Callable[[Callable[[], object]], object] = unguarded,
) -> Tensor:
    """Compute this rank's part of the Gram matrix of the local gradients; the sum over ranks is the whole.

    Products and sums are fp32 and elementwise, so that no reduced-precision matrix mode of the user applies.

    Args:
        memory_mb: bound of the extra memory in MiB; smaller means more rounds.
        local, collective: of a :class:`~ds_silent.distributed.guard.CollectiveGuard`: no error leaves a rank waiting.

    Returns:
        (N, N) fp32.
    """
    ranks = dist.get_world_size(group)
    piece = piece_size(numel, ranks, memory_mb)
    send = torch.zeros(ranks * piece, device=device)
    received = torch.empty(ranks, piece, device=device)
    product = torch.empty(ranks, piece, device=device)
    gram = torch.zeros(ranks, ranks, device=device)
    for begin in range(0, numel, ranks * piece):
        local(partial(_fill, fill, begin, min(begin + ranks * piece, numel), send))
        collective(lambda: dist.all_to_all_single(received.view(-1), send, group=group))
        local(partial(add_inner_products, gram, received, product))
    return gram


def _fill(fill: Fill, begin: int, end: int, send: Tensor) -> None:
    send.zero_()
    fill(begin, end, send[: end - begin])


def add_inner_products(gram: Tensor, rows: Tensor, product: Tensor) -> None:
    """Add the inner products of the N rows to ``gram`` (N, N); ``rows`` and the scratch ``product`` are (N, p) fp32."""
    for rank, row in enumerate(rows):
        torch.mul(rows, row, out=product)
        gram[rank] += product.sum(dim=1)


def piece_size(numel: int, ranks: int, memory_mb: int) -> int:
    """Elements per piece so that three (N, piece) fp32 buffers stay within ``memory_mb`` MiB."""
    return max(1, min(memory_mb * (1 << 20) // (12 * ranks), -(-numel // ranks)))


def copy_overlap(parts: Iterable[tuple[int, Tensor]], begin: int, end: int, out: Tensor) -> None:
    """Copy what ``parts`` (global offset, flat tensor), sorted by offset, hold of begin..end into ``out``."""
    for offset, flat in parts:
        low, high = max(begin, offset), min(end, offset + flat.numel())
        if low < high:
            out[low - begin : high - begin].copy_(flat[low - offset : high - offset])
