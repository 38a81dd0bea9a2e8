"""Replicas of thousands of ranks: the same findings as from everybody's checksums, from a few bytes of each rank."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from ds_silent.distributed.parts import outvoted, parts_of
from ds_silent.kernels.checksums import Bits, Items
from ds_silent.replicas.compare import FEWEST, Comparison, Drift, Replicas, compare, compare_checksums
from tests.support.crowd import act

GROUP: Any = None


def majority_of(values: list[int]) -> int | None:
    usual = max(values, key=values.count)
    return usual if 2 * values.count(usual) > len(values) else None


def test_a_few_ranks_against_their_whole_table() -> None:
    """Each rank its own part, random differences: what the table of all checksums says."""
    generator = random.Random(4)
    for ranks in (2, 3, 5, 8):
        for kinds in (1, 2, 2, 3):
            table = [[generator.randrange(kinds) - 2**63 for _ in range(9)] for _ in range(ranks)]
            results, _ = act([[rank] for rank in range(ranks)], partial(compared, table))
            columns = [list(column) for column in zip(*table, strict=True)]
            apart = tuple(place for place, column in enumerate(columns) if len(set(column)) > 1)
            parts = tuple(parts_of(columns[place]) for place in apart)
            right = tuple(majority_of(columns[place]) for place in apart)
            expected = Comparison(parts_of(map(str, table)), apart, parts, right)
            assert results == [expected] * ranks
            assert expected.outvoted == tuple(sorted({rank for one in parts for rank in outvoted(one)}))


def compared(table: list[list[int]], rank: int) -> Comparison:
    return compare_checksums(torch.tensor(table[rank]), GROUP)


def found_by(ranks: int, changed: dict[int, list[int]], tensors: int) -> tuple[Comparison, int]:
    """Of ``ranks`` replicas of one-element tensors, some of which are changed on some ranks; bytes to one of them."""
    healthy = [rank for rank in range(ranks) if rank not in changed]
    parts = [healthy[:1], healthy[1:], *([rank] for rank in changed)]  # the first one may speak alone

    def comparison(part: int) -> Comparison:
        items: Items = [(f"t{i}", torch.full((1,), float(i))) for i in range(tensors)]
        for place in changed.get(parts[part][0], []):
            items[place][1].add_(0.5 + parts[part][0])
        return compare(items, Bits(), GROUP)

    results, received = act(parts, comparison)
    assert all(result == results[0] for result in results)
    return results[0], max(received)


def test_equal_replicas_cost_bytes_that_do_not_depend_on_the_ranks() -> None:
    found, received = found_by(16_384, {}, 3)
    assert (found.equal, found.apart, received) == (True, (), 32)


@pytest.mark.parametrize("ranks", [9, 16_384])
def test_the_tensors_and_ranks_that_differ_are_found_at_any_size(ranks: int) -> None:
    found, received = found_by(ranks, {5: [1, 2, 7], 8: [2]}, 10)
    assert found.apart == (1, 2, 7)
    assert found.outvoted == (5, 8)
    everybody = tuple(rank for rank in range(ranks) if rank not in (5, 8))
    assert found.groups == (everybody, (5,), (8,))
    assert found.parts == ((tuple(sorted((*everybody, 8))), (5,)), (everybody, (5,), (8,)), found.parts[0])
    assert received == 32 + 16 * 10 + 8 * ranks * (1 + 3)


def test_more_tensors_than_are_asked_about_one_by_one() -> None:
    """Two ranks, one of which differs in every tensor and one in the last: of those asked about together, both."""
    ranks, tensors = 16_384, 723
    found, received = found_by(ranks, {3: list(range(tensors)), 4: [tensors - 1]}, tensors)
    assert found.apart == tuple(range(tensors))
    assert found.outvoted == (3, 4)
    assert {len(parts) for parts in found.parts[:FEWEST]} == {2}
    assert all(parts is found.parts[-1] for parts in found.parts[FEWEST:])
    assert found.parts[-1][1:] == ((3,), (4,))
    healthy: Items = [(f"t{i}", torch.full((1,), float(i))) for i in range(tensors)]
    assert found.right == tuple(Bits()(healthy).tolist())  # by which what a repair brings is checked
    assert received == 32 + 16 * tensors + 8 * ranks * (1 + FEWEST + 1) + 8 * (tensors - FEWEST)
    assert received < 4.6e6


def test_the_first_bad_step_costs_a_few_bytes() -> None:
    """Since when: 12 remembered steps of 723 tensors were 535 MB on 16,384 ranks."""
    ranks, tensors = 16_384, 723
    parts = [[rank for rank in range(ranks) if rank != 7], [7]]

    def localised(part: int) -> Drift | None:
        items: Items = [(f"t{i}", torch.full((1,), float(i))) for i in range(tensors)]
        replicas = Replicas(items, list, history=12)
        for step in range(10, 130, 10):
            if step == 70 and part == 1:
                items[40][1].add_(1.0)
            replicas.remember(step)
        replicas.check(120)
        return replicas.localise(GROUP)

    (found, other), received = act(parts, localised)
    assert found == other
    assert found == Drift(("t40",), (tuple(parts[0]), (7,)), since=69, earliest=60)
    assert received[0] == 32 + 16 * tensors + 8 * ranks * 2 + 16 * 12
    assert received[0] < 0.3e6
