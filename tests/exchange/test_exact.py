"""The exact inner products: any number of chunks, any length, against all gradients side by side in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_silent.exchange import exact
from tests.support.distributed import each, run_distributed


def grams(numel: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the ranks' parts, and the oracle."""
    exact.piece_size = lambda *_: piece
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everybody = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    mine = everybody[rank]
    cut = numel // 3  # two tensors with a gap of alignment between them, as parameters have
    parts = [(0, mine[:cut]), (cut + 5, mine[cut:])]
    group = dist.distributed_c10d._get_default_group()

    def fill(begin: int, end: int, out: torch.Tensor) -> None:
        exact.copy_overlap(parts, begin, end, out)

    ours = exact.exact_gram(fill, numel + 5, group, torch.device("cpu"), memory_mb=1)
    dist.all_reduce(ours)
    vectors = torch.stack(everybody).double()
    return ours, vectors @ vectors.T


def test_chunks_add_up_to_the_whole() -> None:
    """Elements, and those of a piece."""
    cases = {case: case for case in ((1000, 1), (1000, 7), (1000, 250), (1001, 334), (50, 4000))}
    for of_rank in run_distributed(each, 3, (grams, cases)):
        for ours, oracle in of_rank.values():
            torch.testing.assert_close(ours.double(), oracle, rtol=1e-5, atol=1e-4)


def test_memory_is_bounded() -> None:
    for ranks in (2, 8, 64):
        for memory_mb in (1, 64):
            assert 3 * 4 * ranks * exact.piece_size(10**9, ranks, memory_mb) <= memory_mb * 2**20
    assert exact.piece_size(10, 4, 64) == 3  # never more than the gradient needs
