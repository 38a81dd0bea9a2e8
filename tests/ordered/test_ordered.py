"""The ordered reduction's parts: its tree against recursion, its norm against fractions, its exchange against loops."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.training import hash_of
from ds_silent.ordered.exchange import CPU_MEMORY_MB, LongVector, OrderedExchange, covers, gather_runs, joined
from ds_silent.ordered.tree import LocalTree, exponent_of, global_norm, norm_of, square_sums, sum_rows
from tests.support.distributed import run_distributed

PAIRINGS = ("contiguous", "interleaved")


# -- the tree -------------------------------------------------------------------------------------------------------


def by_recursion(leaves: list[Tensor], pairing: str) -> Tensor:
    """The tree over a power of two of leaves, from its root: halves of neighbours, or of every second one."""
    if len(leaves) == 1:
        return leaves[0].float()
    half = len(leaves) // 2
    parts = (leaves[:half], leaves[half:]) if pairing == "contiguous" else (leaves[0::2], leaves[1::2])
    return by_recursion(parts[0], pairing) + by_recursion(parts[1], pairing)


def split_sum(leaves: list[Tensor | None], ranks: int, pairing: str) -> Tensor:
    """What N ranks make of the leaves."""
    steps = len(leaves) // ranks
    rows = []
    for rank in range(ranks):
        tree = LocalTree(steps, pairing)
        for a in range(steps):
            leaf = leaves[rank * steps + a if pairing == "contiguous" else a * ranks + rank]
            tree.push([None if leaf is None else leaf.clone()])
        [value] = tree.take()
        rows.append(torch.zeros(40) if value is None else value)
    return sum_rows(torch.stack(rows), pairing)


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).tolist()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absent", [(), (0,), (3, 4, 5), (1, 9), tuple(range(8)), tuple(range(16))])
def test_every_split_has_the_bits_of_the_recursion(pairing: str, dtype: torch.dtype, absent: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(16, 40, generator=generator) * torch.logspace(-6, 6, 40)
    values[:, :8] = -0.0
    leaves: list[Tensor | None] = [None if n in absent else row.to(dtype) for n, row in enumerate(values)]
    expected = bits(by_recursion([torch.zeros(40) if leaf is None else leaf for leaf in leaves], pairing))
    assert [bits(split_sum(leaves, ranks, pairing)) == expected for ranks in (1, 2, 4, 8, 16)] == [True] * 5


def test_the_pairings_are_two_trees_and_neither_is_a_plain_sum() -> None:
    leaves = list(torch.randn(16, 40, generator=torch.Generator().manual_seed(5)))
    sums = [by_recursion(leaves, pairing) for pairing in PAIRINGS]
    chain = leaves[0].clone()
    for leaf in leaves[1:]:
        chain += leaf
    assert len({tuple(bits(value)) for value in (*sums, chain)}) == 3


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
def test_other_numbers_of_ranks_are_one_tree_too(ranks: int) -> None:
    rows = torch.randn(ranks, 40, generator=torch.Generator().manual_seed(ranks))

    def neighbours(nodes: list[Tensor]) -> Tensor:
        while len(nodes) > 1:
            pairs = [nodes[k : k + 2] for k in range(0, len(nodes), 2)]
            nodes = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
        return nodes[0]

    def halves(nodes: list[Tensor]) -> Tensor:
        while len(nodes) > 1:
            half = math.ceil(len(nodes) / 2)
            nodes = [nodes[k] + nodes[k + half] if k + half < len(nodes) else nodes[k] for k in range(half)]
        return nodes[0]

    assert bits(sum_rows(rows.clone(), "contiguous")) == bits(neighbours(list(rows)))
    assert bits(sum_rows(rows.clone(), "interleaved")) == bits(halves(list(rows)))


@pytest.mark.parametrize(("pairing", "most"), [("contiguous", 4), ("interleaved", 8)])
def test_no_more_partial_sums_wait_than_stated(pairing: str, most: int) -> None:
    tree, waiting = LocalTree(16, pairing), []
    for _ in range(16):
        tree.push([torch.ones(3)])
        waiting.append(sum(map(len, tree._waiting)))
    assert max(waiting) == most


def test_a_tree_has_all_its_leaves_or_none() -> None:
    tree = LocalTree(2, "contiguous")
    tree.push([torch.ones(2), None])
    with pytest.raises(ValueError, match="1 of its 2"):
        tree.take()
    tree.push([torch.ones(2), None])
    with pytest.raises(ValueError, match="2 leaves already"):
        tree.push([torch.ones(2), None])
    first, second = tree.take()
    assert first is not None
    assert (first.tolist(), second) == ([2.0, 2.0], None)
    with pytest.raises(ValueError, match="power of two"):
        LocalTree(3, "contiguous")
    tree.push([torch.ones(2), None])
    [first, _] = tree.take_incomplete() or []
    assert first is not None
    assert first.tolist() == [1.0, 1.0]
    assert tree.take_incomplete() is None


# -- the norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e20, 3e38])
def test_the_norm_does_not_depend_on_the_cut(scale: float) -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).mul_(scale)
    exponent = exponent_of(float(values.max()))

    def norm(sizes: list[int]) -> float:
        words = [0] * 8
        for piece in torch.split(values, sizes):
            for number, total in enumerate(int(part) for part in square_sums([piece], exponent)):
                for place in range(4):
                    words[4 * number + place] += (total >> 16 * place) & 0xFFFF
        return norm_of(words, exponent)

    found = {norm(sizes) for sizes in ([200_000], [7, 199_993], [66_667, 66_667, 66_666], [1] * 5 + [199_995])}
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(values.double().norm()), rel=1e-6)


def test_squares_are_added_exactly() -> None:
    values = torch.tensor([1.0, -0.75, 3 * 2.0**-24, 2.0**-24])
    high, low = (int(part) for part in square_sums([values], exponent_of(1.0)))
    whole = [round(Fraction(float(x)) * 2 ** exponent_of(1.0)) for x in values]
    assert (high << 24) + low == sum(x * x for x in whole)
    assert norm_of([0] * 8, exponent_of(0.0)) == 0.0


# -- the exchange ---------------------------------------------------------------------------------------------------


def test_a_long_vector_is_read_and_written_across_its_tensors() -> None:
    tensors = [torch.arange(5.0), None, torch.zeros(0), torch.arange(6, dtype=torch.bfloat16).view(2, 3)]
    vector, whole = LongVector([0, 5, 8, 8], tensors), torch.tensor([0.0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 3, 4, 5])
    for begin, end in itertools.combinations(range(15), 2):
        out = torch.full((end - begin,), -1.0)
        vector.read(begin, end, out)
        assert out.tolist() == whole[begin:end].tolist(), (begin, end)
    vector.write(3, torch.arange(10.0, 20.0))
    assert [None if t is None else t.flatten().tolist() for t in tensors] == [
        [0.0, 1.0, 2.0, 10.0, 11.0],
        None,
        [],
        [15.0, 16.0, 17.0, 18.0, 19.0, 5.0],
    ]


def test_shares_must_cover_everything_once() -> None:
    assert joined([(0, 3), (3, 2), (7, 1), (8, 0)]) == [(0, 5), (7, 1)]
    assert covers([[(5, 2)], [(0, 5)], []], 7)
    assert not covers([[(5, 2)], [(0, 4)]], 7)
    assert not covers([[(5, 2)], [(0, 6)]], 7)


def exchange_everywhere(pairing: str) -> list[str]:
    """Uneven shares in odd orders, one rank with next to nothing, many rounds or one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    sizes = [70_001, 3, 120_000, 1]
    rows = [[torch.randn(size, generator=generator) for size in sizes] for _ in range(ranks)]
    offsets = [0, 70_001, 70_004, 190_004]
    own = [[(100_000, 90_005), (0, 10)], [(10, 99_980)], [(99_990, 10)]][rank]
    group, device = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    runs = gather_runs(own, group, device)
    assert runs[rank] == own
    whole = torch.stack([torch.cat(row) for row in rows])
    expected = sum_rows(whole.clone(), pairing) / ranks
    found = []
    for memory, gathered in ((1, torch.float32), (64, torch.float32), (64, torch.bfloat16), (1, None)):
        exchange = OrderedExchange(runs, group, device, memory, pairing, gathered, gram=True)
        assert exchange.nbytes <= min(memory, CPU_MEMORY_MB) * 2**20 * 7 / 6
        results = [torch.full((size,), -1.0) for size in sizes]
        gram = exchange.mean(LongVector(offsets, list(rows[rank])), LongVector(offsets, list(results)), gram=True)
        assert gram is not None
        dist.all_reduce(gram)
        torch.testing.assert_close(gram.double(), whole.double() @ whole.double().T, rtol=1e-5, atol=0.05)
        result = torch.cat(results)
        if gathered is None:
            mine = torch.cat([torch.arange(begin, begin + numel) for begin, numel in own])
            others = torch.ones(len(result), dtype=torch.bool).index_fill_(0, mine, False)
            assert torch.equal(result[mine], expected[mine])
            assert bool((result[others] == -1.0).all())
        else:
            assert torch.equal(result, expected.to(gathered).float())
            found.append(hash_of([result]))
    norm = global_norm([part for begin, n in own for part in (whole[0][begin : begin + n],)], group, device)
    assert norm == pytest.approx(float(whole[0].double().norm()), rel=1e-6)
    bad = torch.tensor([math.nan if rank == 1 else 1.0])
    assert global_norm([bad], group, device) is None
    return found


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_pieces_and_memory_do_not_change_bits(pairing: str) -> None:
    results = run_distributed(exchange_everywhere, 3, (pairing,))
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1] != results[0][2]
