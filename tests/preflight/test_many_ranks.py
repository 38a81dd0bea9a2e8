"""The preflight of thousands of ranks says what that of a few says, and what travels does not grow with the items."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from preflight_scale import FAULTS, TENSORS, SimulatedRanks, items_of_a_rank, measure

from ds_silent.distributed.parts import parts_of, parts_of_numbers
from ds_silent.exchange.collectives import same_on_all
from ds_silent.preflight.comparison import compare, compared, questions
from ds_silent.preflight.items import Expectation, Hashes, Item, item_of
from ds_silent.preflight.messages import events_of, table, to_json, verdict
from tests.support.distributed import run_distributed
from tests.support.preflight import outcome_of


def test_parts_by_sorting_are_the_parts_by_looking() -> None:
    generator = random.Random(3)
    for ranks in (1, 2, 3, 9, 200):
        for kinds in (1, 2, 5, 10 * ranks):
            values = [generator.randrange(kinds) - 2**62 for _ in range(ranks)]
            assert parts_of_numbers(np.array(values)) == parts_of(values)


def naive(expectation: Expectation, values: Sequence[int]) -> tuple[bool, set[int]]:
    """As expected? and the odd ones, from the definition."""
    everybody = range(len(values))
    counts = {value: values.count(value) for value in set(values)}
    if expectation in ("equal", "alike"):
        ok = len(counts) == 1 or (expectation == "alike" and len(counts) == len(values))
        usual = [value for value, count in counts.items() if count > len(values) / 2]
        return ok, set() if ok or not usual else {rank for rank in everybody if values[rank] != usual[0]}
    if expectation == "different":
        odd = {rank for rank in everybody if counts[values[rank]] > 1}
        return not odd, odd
    return True, set()


@pytest.mark.parametrize("ranks", [7, 1024])
def test_every_rank_that_is_odd_is_named_at_any_size(ranks: int) -> None:
    """More items differ than are asked about one by one: what is said of those together holds for each of them."""
    generator = np.random.default_rng(ranks)
    expectations: tuple[Expectation, ...] = ("equal", "alike", "different", "free")
    items = [Item(f"w{i}", "weights", "equal", "a", (i, 1)) for i in range(700)]
    items += [Item(f"{e}{i}", "config", e, "b", (i, 2)) for i in range(3) for e in expectations]
    hashes: Hashes = np.repeat(np.array([item.hash for item in items], dtype=np.int32)[None], ranks, 0)
    hashes[3, 5:650, 1] = 9  # one rank in most tensors, another one in a few
    hashes[5, 600:640, 0] = -1
    hashes[:, -8:-4, 1] += np.arange(ranks, dtype=np.int32)[:, None]
    hashes[:, -4:, 1] += generator.integers(0, 2, (ranks, 4), dtype=np.int32)
    outcome = compared(items, SimulatedRanks(items, hashes))
    joint = [index for index, one in enumerate(outcome.items) if one.joint]
    assert bool(joint) == (ranks == 1024)
    for index, one in enumerate(outcome.items):
        values = [tuple(pair) for pair in hashes[:, index].tolist()]
        if index in joint:
            assert (one.ok, one.odd) == (False, (3, 5))
            assert all(len({values[rank] for rank in part}) == 1 for part in one.parts)
        else:
            assert (one.ok, set(one.odd)) == naive(one.item.expectation, [hash(v) for v in values]), one.item.name
            assert one.parts == parts_of(values)
    if ranks == 7:  # and exactly what is known when everybody's hashes are there
        known = outcome_of(items, hashes)
        assert [(one.parts, one.ok, one.odd) for one in known.items] == [
            (one.parts, one.ok, one.odd) for one in outcome.items
        ]


def test_what_is_asked_together() -> None:
    items = [item_of(str(i), "config" if i % 2 else "weights", "x") for i in range(8)]
    items += [item_of("seed", "generators", "x", None, "alike")]
    assert questions(items, [0, 2, 3, 4, 5, 6, 8], 7) == ([0, 2, 3, 4, 5, 6, 8], [])
    assert questions(items, [0, 2, 3, 4, 5, 6, 8], 3) == ([0, 3, 8], [[2, 4, 6], [5]])
    assert questions(items, [0, 8], 0) == ([8], [[0]])  # whether they are distinct cannot be asked together


def test_what_is_received_said_and_written_is_bounded() -> None:
    small = measure(8, "healthy, own seeds")
    for fault in FAULTS:
        cost = measure(4096, fault)
        assert cost.received < 16 * (8 + TENSORS + 64) + 8 * 4096 * (128 + 16) + 32 * 8 * 160, fault
        assert cost.json_bytes < 3 * small.json_bytes, fault
        assert all(len(sentence) < 400 for sentence in cost.events), fault
        assert bool(cost.events) == ("healthy" not in fault), fault


def test_a_file_of_many_ranks_says_how_many_it_leaves_out() -> None:
    items = [item_of("share", "sampler", "0", None, "different")]
    hashes: Hashes = np.zeros((100, 1, 2), dtype=np.int32)
    hashes[:, 0, 0] = np.arange(100) // 4
    hashes[60:64, 0, 0] = -5
    outcome = outcome_of(items, hashes, {0: [str(rank) for rank in range(100)]})
    (written,) = json.loads(json.dumps(to_json(outcome)))["items"]
    assert written["odd_ranks"] == list(range(8))
    assert written["ranks"] == [list(range(4 * k, 4 * k + 4)) for k in range(8)]
    assert written["values"] == [str(4 * k) for k in range(8)]
    assert written["cut"] == {"groups": 25, "sizes": [4] * 8, "odd": 100}
    few = to_json(outcome_of(items, hashes[:64]))["items"][0]
    assert (len(few["ranks"]), "cut" in few) == (16, False)


def test_the_table_has_a_bounded_number_of_rows() -> None:
    items = items_of_a_rank()
    hashes: Hashes = np.repeat(np.array([item.hash for item in items], dtype=np.int32)[None], 3, 0)
    FAULTS["one rank's weights"](items, hashes)
    assert table(outcome_of(items, hashes)).row_count < 45


# -- real ranks ------------------------------------------------------------------------------------------------------


def asked() -> tuple[list[bool], list[str], list[tuple[str, ...]]]:
    """Numbers at the ends of what int32 holds; then items of which the second and the third differ."""
    rank, lowest, highest = dist.get_rank(), -(2**31), 2**31 - 1
    group = dist.distributed_c10d._get_default_group()
    mine = torch.tensor([lowest, highest, lowest + rank, [lowest, highest][rank], 7 - rank, 7], dtype=torch.int32)
    items = [
        item_of("a", "config", "same"),
        item_of("b", "config", f"ä{rank}" * 100),
        item_of("c", "config", str(rank)),
        item_of("d", "config", str(rank), None, "free"),
    ]
    outcome = compare(items, group, torch.device("cpu"))
    event = [event.message for event in events_of(outcome)]
    assert [verdict(one) for one in outcome.items] == ["equal", "no agreement", "no agreement", "free"]
    return same_on_all(mine, group).tolist(), event, [one.texts for one in outcome.items]


def test_ranks_ask_each_other() -> None:
    (alike, messages, texts), other = run_distributed(asked, 2)
    assert other[:2] == (alike, messages)
    assert alike == [True, True, False, False, False, True]
    assert texts[:3] == [("same",), (("ä0" * 100)[: 160 * 2 // 3], ("ä1" * 100)[: 160 * 2 // 3]), ("0", "1")]
    assert "on rank 0" in messages[0]
    assert "on rank 1" in messages[0]
