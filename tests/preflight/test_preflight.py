"""Preflight: silent on healthy ranks, one event per fault with the right kind and ranks, and no guess."""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import ds_silent
from ds_silent.frameworks.deepspeed.state import training_of
from ds_silent.maths.fingerprint import hash_text, rng_hashes
from ds_silent.preflight.comparison import TEXT_BYTES, compare
from ds_silent.preflight.inventory import (
    SamplerFacts,
    local_items,
    weights_hash,
)
from ds_silent.preflight.items import Expectation, Item, item_of
from ds_silent.preflight.messages import events_of, short_numbers, table, to_json
from tests.support.distributed import run_on_kept_ranks
from tests.support.preflight import outcome_of
from tests.support.training import Case, Probe

# -- judging ---------------------------------------------------------------------------------------------------------


def judged(values: str, expectation: Expectation) -> tuple[bool, tuple[int, ...]]:
    """One item on as many ranks as there are letters; equal letters are equal values."""
    item = item_of("thing", "config", values[0], None, expectation)
    hashes = np.array([[hash_text(letter)] for letter in values], dtype=np.int32)
    finding = outcome_of([item], hashes, {0: list(values)}).items[0]
    assert sorted(rank for part in finding.parts for rank in part) == list(range(len(values)))
    return finding.ok, finding.odd


@pytest.mark.parametrize(
    ("values", "equal", "alike", "different"),
    [  # each: (as expected?, ranks that are named)
        ("a", (True, ()), (True, ()), (True, ())),
        ("aa", (True, ()), (True, ()), (False, (0, 1))),
        ("ab", (False, ()), (True, ()), (True, ())),  # two ranks: nobody is named
        ("aba", (False, (1,)), (False, (1,)), (False, (0, 2))),
        ("abb", (False, (0,)), (False, (0,)), (False, (1, 2))),
        ("abc", (False, ()), (True, ()), (True, ())),
        ("aabb", (False, ()), (False, ()), (False, (0, 1, 2, 3))),  # a tie
        ("aabc", (False, ()), (False, ()), (False, (0, 1))),  # two of four are no majority
        ("abcaa", (False, (1, 2)), (False, (1, 2)), (False, (0, 3, 4))),
    ],
)
def test_who_is_the_odd_one_out(values: str, equal: Any, alike: Any, different: Any) -> None:
    assert judged(values, "equal") == equal
    assert judged(values, "alike") == alike
    assert judged(values, "different") == different
    assert judged(values, "free") == (True, ())


def items_and_hashes(*ranks: list[Item]) -> tuple[list[Item], Any, dict[int, list[str]]]:
    hashes = np.array([[item.hash for item in items] for items in ranks], dtype=np.int32)
    texts = {index: [items[index].shown for items in ranks] for index in range(len(ranks[0]))}
    return ranks[0], hashes, texts


def test_one_event_for_many_items_of_one_fault() -> None:
    def weights(value: str) -> list[Item]:
        return [item_of(f"weight {i}", "weights", value + str(i)) for i in range(40)]

    items, hashes, texts = items_and_hashes(weights("a"), weights("b"), weights("a"))
    events = events_of(outcome_of(items, hashes, texts))
    assert [(e.kind, e.severity, e.ranks, e.step, e.where) for e in events] == [
        ("initial-weights-mismatch", "error", (1,), 0, "weight 0")
    ]
    assert "a0 on ranks 0, 2; b0 on rank 1 (and 39 more differ in the same way)" in events[0].message
    assert events[0].remedy


def test_without_a_majority_the_sentence_says_so() -> None:
    items, hashes, texts = items_and_hashes([item_of("lr", "optimizer", "1")], [item_of("lr", "optimizer", "2")])
    event = events_of(outcome_of(items, hashes, texts))[0]
    assert event.ranks == ()
    assert "no majority" in event.message
    assert "1 on rank 0; 2 on rank 1" in event.message


def test_permutations_of_ones_own_say_what_is_missed() -> None:
    ranks = [[item_of("sampler's permutation", "sampler", str(rank))] for rank in range(4)]
    items, hashes, texts = items_and_hashes(*ranks)
    event = events_of(outcome_of(items, hashes, texts))[0]
    assert (event.kind, event.ranks) == ("data-order-mismatch", ())
    assert "68.4% of the rows" in event.message


def test_the_short_table_has_a_row_per_group() -> None:
    for ranks, title in ((3, "ds_silent preflight: 3 ranks"), (1, "ds_silent preflight: 1 rank")):
        items, hashes, _ = items_and_hashes(*[[item_of(f"w{i}", "weights", "x") for i in range(300)]] * ranks)
        drawn = table(outcome_of(items, hashes))
        assert (drawn.title, drawn.row_count) == (title, 1)


def test_values_that_look_alike_are_told_apart() -> None:
    long = "x" * 500
    items, hashes, texts = items_and_hashes([item_of("c", "config", long + "1")], [item_of("c", "config", long + "2")])
    texts[0] = [text[:160] for text in texts[0]]
    message = events_of(outcome_of(items, hashes, texts))[0].message
    assert "[value 1] on rank 0" in message
    assert "[value 2] on rank 1" in message


def test_a_value_that_was_cut_ends_with_a_whole_word_and_a_mark() -> None:
    def message(*shown: str) -> str:
        items, hashes, texts = items_and_hashes(*[[item_of("loss", "objective", text)] for text in shown])
        texts[0] = [text[:TEXT_BYTES] for text in texts[0]]
        return events_of(outcome_of(items, hashes, texts))[0].message

    chain = " > ".join(["MulBackward0"] * 10 + ["DivBackward0", "SumBackward0"])
    cut = chain[:150]
    assert (chain[150:160], len(chain)) == ("DivBackwar", 177)
    assert message(chain, "NllLoss").startswith(f"loss differs between ranks: {cut}… on rank 0; NllLoss on rank 1.")
    other = message(chain, chain.replace("Div", "Sub"))  # they differ in the word that is cut
    assert f"{cut}… [value 1] on rank 0; {cut}… [value 2] on rank 1" in other
    assert message("x" * 160, "y").startswith(f"loss differs between ranks: {'x' * 160} … on rank 0; y on rank 1")
    assert message("x" * 159, "y").startswith(f"loss differs between ranks: {'x' * 159} on rank 0; y on rank 1")


def test_the_worst_comes_first_and_faults_are_kept_apart() -> None:
    def rank(device: str, lr: str) -> list[Item]:
        return [item_of("device", "environment", device, severity="info"), item_of("lr", "optimizer", lr)]

    items, hashes, texts = items_and_hashes(rank("x", "1"), rank("y", "1"), rank("x", "2"))
    found = [(e.where, e.severity, e.ranks) for e in events_of(outcome_of(items, hashes, texts))]
    assert found == [("lr", "error", (2,)), ("device", "info", (1,))]


def test_the_table_counts_in_words_what_is_as_expected() -> None:
    def rank(value: str) -> list[Item]:
        return [
            item_of("same", "generators", "a"),
            *(item_of(f"seed {one}", "generators", value, None, "alike") for one in range(2)),
            item_of("draws", "generators", value, None, "better different"),
            item_of("host", "environment", value, None, "free"),
        ]

    outcome = outcome_of(*items_and_hashes(rank("1"), rank("2"), rank("3")))
    drawn = io.StringIO()
    Console(file=drawn, width=200).print(table(outcome))
    assert re.search(r"generators +│ 4 items +│ 4 as expected +│", drawn.getvalue())
    assert "1 different between ranks, which is allowed" in drawn.getvalue()


def test_the_table_shows_text_as_text() -> None:
    def rank(value: str) -> list[Item]:
        return [item_of("[red]lr[/red]", "optimizer", value), item_of("seed", "generators", value, None, "alike")]

    items, hashes, texts = items_and_hashes(rank("[bold]\x1b[2J"), rank("b"), rank("b"))
    outcome = outcome_of(items, hashes, texts)
    short = io.StringIO()
    Console(file=short, width=140).print(table(outcome))
    assert "as expected" not in short.getvalue()
    assert short.getvalue().count("rank 0 differs") == 2
    assert "[red]lr[/red]" in short.getvalue()
    assert "\x1b[2J" not in short.getvalue()
    written = json.loads(json.dumps(to_json(outcome), allow_nan=False))
    assert written["ok"] is False
    assert written["items"][0]["odd_ranks"] == [0]
    assert written["items"][0]["ranks"] == [[1, 2], [0]]


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_the_table_has_colours_on_a_terminal_only(
    terminal: bool, no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    items, hashes, texts = items_and_hashes(*[[item_of("lr", "optimizer", value)] for value in "abb"])
    Console(file=out, width=120).print(table(outcome_of(items, hashes, texts)))
    assert ("\x1b[1;31mrank 0 differs" in out.getvalue()) == coloured
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", out.getvalue())) == coloured


# -- long numbers are shown short, and different ones never alike -----------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["0.15000000000000002"], ["0.15"]),
        (["0.15000000000000002", "0.3"], ["0.15", "0.3"]),
        (["[0.9, 0.9990000000000001]"], ["[0.9, 0.999]"]),
        (["-3.0000000000000004e-05"], ["-3e-05"]),
        (["0.15000000000000002", "0.15"], ["0.15000000000000002", "0.15"]),  # two values
        (["0.15, 0.15000000000000002"], ["0.15, 0.15000000000000002"]),  # of two parameter groups
        (["0.30000000000000004, 0.15", "0.15000000000000002"], ["0.3, 0.15", "0.15000000000000002"]),
        (["0.15000000000000002", "0.1500000000000001"], ["0.15000000000000002", "0.1500000000000001"]),
        (["0.15000000000000002", "0.15000001"], ["0.15", "0.15000001"]),
        (["1.000000000001e+300"], ["1.000000000001e+300"]),  # no float32
        (["0.123456789012"], ["0.12345679"]),
        (["12345678901234567890", "0.0"], ["12345678901234567890", "0.0"]),
        (["2.10", "2.4.1", "torch 2.10.0+cu12", "1e-08"], ["2.10", "2.4.1", "torch 2.10.0+cu12", "1e-08"]),
        (["10.1234567890.2", "a1.23456789012"], ["10.1234567890.2", "a1.23456789012"]),
    ],
)
def test_short_numbers(texts: list[str], shown: list[str]) -> None:
    assert short_numbers(texts) == shown


@pytest.mark.parametrize(("other", "told"), [("0.3", "0.15 on ranks 0, 1; 0.3"), ("0.15", "0.15000000000000002 on")])
def test_the_message_of_a_learning_rate(other: str, told: str) -> None:
    values = ["0.15000000000000002", "0.15000000000000002", other]
    items = [item_of("learning rate", "optimizer", value) for value in values]
    hashes = np.array([[item.hash] for item in items], dtype=np.int32)
    [event] = events_of(outcome_of(items[:1], hashes, {0: values}))
    assert told in event.message


# -- real ranks ------------------------------------------------------------------------------------------------------


def engine_of(case: Case, directory: str, seed: int) -> tuple[Any, dict[str, Any], Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = Probe(None)
    before = weights_hash(model)
    config = case.config(Path(directory), enabled=False)
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, config, before


def compared(items: list[Item]) -> list[tuple[str, str, tuple[int, ...], str | None]]:
    outcome = compare(items, dist.distributed_c10d._get_default_group(), torch.device("cpu"))
    return [(event.kind, event.severity, event.ranks, event.where) for event in events_of(outcome)]


HEALTHY = [(0, False), (0, True), (1, True), (2, False), (3, True)]  # stage, own seeds


def healthy_ranks(directory: str) -> list[Any]:
    """Every stage; seeded alike, or each rank from its own seed."""
    results: list[Any] = []
    for stage, own in HEALTHY:
        rank = dist.get_rank()
        engine, config, before = engine_of(Case(stage=stage), directory, 5 + (rank if own else 0))
        facts = SamplerFacts(dist.get_world_size(), rank, (1, 2), 3, 100)
        states = rng_hashes()
        items = local_items(training_of(engine, config), facts, before, dist.get_world_size())
        found = compared(items)
        results.append((found, states == rng_hashes(), len(items), sum(i.group == "weights" for i in items)))
        engine.destroy()
    return results


def test_healthy_ranks_are_silent_on_every_stage(tmp_path: Path) -> None:
    for result in run_on_kept_ranks(healthy_ranks, 3, (str(tmp_path),)):
        for found, untouched, count, _ in result:
            assert found == []
            assert untouched  # the comparison itself draws no random number
            assert count > 40
        parameters = len(list(Probe(None).parameters()))
        assert [weights for *_, weights in result] == [1 + parameters] * 4 + [1]  # stage 3: none has two owners


def other_facts(facts: list[Any], **changes: Any) -> None:
    facts[0] = replace(facts[0], **changes)


Break = Callable[[Any, dict[str, Any], list[Any]], object]  # (engine, configuration, [facts, hash before])
FAULTS: dict[str, tuple[Break, str, str, tuple[int, ...]]] = {
    "weights": (lambda e, c, f: e.module.norm.weight.data[3].add_(1e-7), "initial-weights-mismatch", "error", (2,)),
    "buffer": (lambda e, c, f: e.module.running[1].fill_(2.0), "initial-weights-mismatch", "error", (2,)),
    "before": (lambda e, c, f: f.__setitem__(1, (9, 9)), "initial-weights-mismatch", "warning", (2,)),
    "flags": (lambda e, c, f: e.module.frozen.weight.requires_grad_(True), "config-mismatch", "error", (2,)),
    "hook": (lambda e, c, f: e.module.norm.register_forward_hook(lambda *_: None), "config-mismatch", "info", (2,)),
    "seed": (lambda e, c, f: torch.manual_seed(77), "seed-mismatch", "warning", (2,)),
    "numpy": (lambda e, c, f: np.random.seed(77), "seed-mismatch", "warning", (2,)),
    "rate": (lambda e, c, f: e.optimizer.param_groups[0].update(lr=0.5), "config-mismatch", "error", (2,)),
    "config": (lambda e, c, f: c.update(gradient_clipping=0.5), "config-mismatch", "error", (2,)),
    "environment": (lambda e, c, f: os.environ.update(NCCL_ALGO="Tree"), "config-mismatch", "warning", (2,)),
    "order": (lambda e, c, f: other_facts(f, seed=4, permutation=(5, 5)), "data-order-mismatch", "error", (2,)),
    "share": (lambda e, c, f: other_facts(f, rank=0), "duplicate-data", "error", (0, 2)),
    "shares": (lambda e, c, f: other_facts(f, world_size=1, rank=0), "duplicate-data", "error", (2,)),
    "sampler": (lambda e, c, f: f.__setitem__(0, None), "data-order-mismatch", "error", (2,)),
    "model": (
        lambda e, c, f: setattr(e.module, "extra", torch.nn.Linear(1, 1)),
        *("initial-weights-mismatch", "error", (2,)),
    ),
    "reading": (
        lambda e, c, f: e.module.register_buffer("broken", torch.empty(2, device="meta")),
        *("initial-weights-mismatch", "error", (2,)),
    ),
}


def faulty_ranks(directory: str) -> list[Any]:
    """Each fault on rank 2 of 4, one after another in the same processes."""
    found = []
    for fault, *_ in FAULTS.values():
        rank = dist.get_rank()
        engine, config, before = engine_of(Case(stage=1), directory, 5)
        engine.module.register_buffer("running", torch.ones(2))
        facts = [SamplerFacts(dist.get_world_size(), rank, (1, 2), 3, 100), before]
        if rank == 2:
            fault(engine, config, facts)
        found.append(compared(local_items(training_of(engine, config), *facts, dist.get_world_size())))
        os.environ.pop("NCCL_ALGO", None)
        engine.destroy()
    return found


def test_every_fault_is_one_event_on_the_right_rank(tmp_path: Path) -> None:
    results = run_on_kept_ranks(faulty_ranks, 4, (str(tmp_path),), timeout=200)
    assert all(result == results[0] for result in results)  # every rank knows the same
    for (name, (_, *expected)), events in zip(FAULTS.items(), results[0], strict=True):
        assert [list(event[:3]) for event in events] == [expected], (name, events)
        if name == "before":
            assert events[0][3] == "initial weights before DeepSpeed's broadcast"


def two_ranks(directory: str) -> list[Any]:
    engine, config, before = engine_of(Case(stage=0), directory, 5 + dist.get_rank())
    if dist.get_rank():
        engine.optimizer.param_groups[0]["lr"] = 0.5
    return compared(local_items(training_of(engine, config), None, before))


def test_with_two_ranks_nobody_is_named(tmp_path: Path) -> None:
    for found in run_on_kept_ranks(two_ranks, 2, (str(tmp_path),)):
        assert found == [("config-mismatch", "error", (), "learning rate")]
