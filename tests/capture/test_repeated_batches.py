"""SAM and closures take one batch several times in a row: its rows count once. A loader's repeated rows still count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent
from ds_silent.capture.batch_rows import RowIds, id_capacity
from ds_silent.capture.row_hashes import row_hashes
from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.row_ids import sampling_of, unpack_ids
from ds_silent.rules.cleared import REPEATS
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks


def taken(rows: RowIds) -> list[int]:
    packed = rows.take(torch.device("cpu"))
    rows.end_step()
    return [] if packed is None else unpack_ids(packed[None].double()).values.tolist()


def new() -> Tensor:
    return torch.arange(8).reshape(4, 2)


HASHED = row_hashes([new()]).tolist()


@pytest.mark.parametrize("between", [False, True], ids=["in one step", "in several"])
@pytest.mark.parametrize("view", [False, True])
def test_the_same_tensors_count_once(between: bool, view: bool) -> None:
    rows, batch = RowIds(enabled=True, capacity=16, micro_batch=4), torch.cat((new(), new()))
    found = []
    for _ in range(3):
        rows.forward((batch[:4] if view else batch,), {})
        if between:
            found += taken(rows)
    assert found + taken(rows) == (HASHED if view else 2 * HASHED)


def test_a_pass_begins_with_its_first_batch_and_not_with_what_an_agent_acts_on_before_it() -> None:
    rows = RowIds(enabled=True, capacity=16, micro_batch=4)
    rows.are_others = lambda tensors, same: tensors[0].ndim == 1
    rows.forward((torch.full((8,), 1.0),), {}, begins=lambda: True)
    rows.forward((torch.full((8,), 2.0),), {})
    rows.forward((new(),), {})
    assert taken(rows) == HASHED
    assert rows.starts == (0,)


@pytest.mark.parametrize("forgotten", ["acted on", "dropped"])
def test_a_pass_begins_with_the_next_batch_where_its_first_is_left_out(forgotten: str) -> None:
    rows, weight = RowIds(enabled=True, capacity=16, micro_batch=4), torch.ones(1, requires_grad=True)
    outputs = []
    for begins in (True, False):
        rows.forward((new(),), {}, begins=lambda begins=begins: begins)  # type: ignore[misc]
        outputs.append(weight * 2.0)
        rows.forwarded(outputs[-1])
        if forgotten == "dropped" and begins:
            rows.backward_ended()
    if forgotten == "dropped":  # the second one's backward is still to come
        rows.drop()
    outputs[1].backward()  # type: ignore[no-untyped-call]
    rows.backward_ended()
    assert taken(rows) == HASHED
    assert rows.starts == (0,)


def test_the_size_of_inputs_is_read_at_measured_steps_alone() -> None:
    rows, batches = RowIds(enabled=True, capacity=64, micro_batch=4), [torch.full((4, 2), size) for size in (3.0, 5.0)]
    for measured, size in ((True, 4.0), (False, None)):
        rows.is_measured = lambda measured=measured: measured  # type: ignore[misc]
        for batch in batches:
            rows.forward((batch,), {})
        _, found = rows.sizes()
        assert (None if found is None else float(found)) == size
        rows.end_step()
    assert len(taken(rows)) == 16  # rows are followed at every step


def test_what_is_another_batch_counts() -> None:
    rows = RowIds(enabled=True, capacity=64, micro_batch=4)
    batch = torch.cat((new(), new()))
    for part in batch.chunk(2):
        rows.forward((part,), {})
    assert taken(rows) == 2 * HASHED  # another part of the same tensor
    batch.add_(0)
    rows.forward((batch[4:],), {})
    assert taken(rows) == HASHED  # a buffer that a loader fills again
    rows.forward((new(),), {})
    rows.forward((new(),), {})
    assert taken(rows) == 2 * HASHED  # a loader that gives the same rows again
    with torch.inference_mode():
        frozen = new()
    rows.forward((frozen,), {})
    rows.forward((frozen,), {})
    assert taken(rows) == 2 * HASHED  # nobody counts its changes


def test_one_batch_for_ever_is_found_out() -> None:
    rows, batch = RowIds(enabled=True, capacity=4, micro_batch=4), new()
    counted = []
    for _ in range(REPEATS + 3):
        rows.forward((batch,), {})
        counted.append(len(taken(rows)))
    assert counted == [4] + [0] * (REPEATS - 1) + [4] * 3


def test_after_a_gradient_was_dropped_the_next_forward_counts() -> None:
    rows, batch = RowIds(enabled=True, capacity=4, micro_batch=4), new()
    rows.forward((batch,), {})
    rows.backward_ended()
    rows.drop()
    rows.forward((batch,), {})
    assert taken(rows) == HASHED


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("between", [False, True], ids=["in one step", "in several"])
def test_ids_of_a_repeated_batch_count_once(late: bool, between: bool) -> None:
    rows, batch, ids, found = RowIds(enabled=True, capacity=8, micro_batch=4), new(), torch.arange(4), []
    for _ in range(2):
        if not late:
            rows.given(ids)
        rows.forward((batch,), {})
        if late:
            rows.given(ids)
        if between:
            found += taken(rows)
    assert found + taken(rows) == [0, 1, 2, 3]


@dataclass
class Unknown:
    """Nobody knows which tensors such an output holds."""

    values: Tensor


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (lambda model, one: model(one), False),
        (lambda model, one: {"a": (model(one), 1.0, None), "b": model(one).detach()}, False),
        (lambda model, one: {"a": [model(one)], "b": Unknown(model(one))}, True),
        (lambda model, one: [model(one) for _ in range(20)], True),  # too many to look at each
        (lambda model, one: model(one).detach(), True),  # it has no graph
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_of_which_no_gradient_comes_is_no_row(other: Any, counts: bool, trains: bool) -> None:
    """If one comes of another; where it comes of none, the gradient has gone a way that is not seen."""
    model, rows = nn.Linear(2, 1), RowIds(enabled=True, capacity=64, micro_batch=4)
    batches = [new().float(), new().float() + 1.0]
    rows.forward((batches[0],), {})
    rows.forwarded(other(model, batches[0]))
    rows.forward((batches[1],), {})
    output = model(batches[1])
    rows.forwarded(output)
    if trains:
        output.sum().backward()
    rows.backward_ended()
    expected = batches if counts or not trains else batches[1:]
    assert taken(rows) == [one for batch in expected for one in row_hashes([batch]).tolist()]


def test_a_batch_of_which_a_later_forward_trains_is_a_row() -> None:
    model, rows, batch = nn.Linear(2, 1), RowIds(enabled=True, capacity=64, micro_batch=4), new().float()
    for trains in (False, True):
        rows.forward((batch,), {})
        output = model(batch)
        rows.forwarded(output)
        if trains:
            output.sum().backward()
    rows.backward_ended()
    assert taken(rows) == row_hashes([batch]).tolist()


def test_where_nobody_says_how_many_micro_batches_come_there_is_room_for_several() -> None:
    config = SilentConsistencyConfig(interval=2)
    assert id_capacity(config, 4, ranks=2) == 8
    assert id_capacity(config, 4, ranks=2, told=False) == 16 * 8
    assert id_capacity(config, 100, ranks=2, told=False) == 512
    assert id_capacity(config, 400, ranks=2, told=False) == 800
    assert sampling_of(64, id_capacity(config, 16, 64, told=False)).level == 0  # no sample of the rows because of it
    assert id_capacity(config, 4, ranks=100_000, told=False) == 8


ROWS, BATCH, EPOCHS = 128, 4, 3
CONSTANT = ("nodes", "coordinates", "coordinates anew")


def loader_of_rank() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 1, generator=generator))
    sampler: Any = DistributedSampler(data, seed=3)
    return DataLoader(data, BATCH, sampler=sampler)


def batches(kind: str, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    sampler: Any = loader.sampler
    if kind == "stuck" and dist.get_rank() == 1:
        [*_, kept] = loader
        yield from (kept for _ in range(EPOCHS * len(loader)))
        return
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        half, before = len(loader) // 2, None
        anew = kind == "begun anew" or (kind == "begun anew on rank 1" and dist.get_rank() == 1)
        if anew:
            yield from islice(loader, half)
        for place, batch in enumerate(islice(loader, half) if anew or kind == "cut" else loader):
            replaced = kind == "replaced" or (kind == "replaced on rank 1" and dist.get_rank() == 1)
            before = before if before is not None and (kind == "kept" or (replaced and place % 2)) else batch
            yield before
            if kind == "twice":  # as from two workers that read the same stream
                yield tuple(part.clone() for part in batch)  # type: ignore[misc]


def ahead(given: Iterator[Any], batches: int) -> Iterator[Any]:
    """Fetch some batches ahead, over the end of a pass, as a thread with a queue does."""
    queue = deque(islice(given, batches))
    while queue:
        queue.extend(islice(given, 1))
        yield queue.popleft()


def train(kind: str, directory: Path) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    block, loader = {"output_dir": str(directory), "tensorboard": False}, loader_of_rank()
    observer = ds_silent.attach(model, block, optimizer=optimizer, loader=loader if kind == "accumulates" else None)
    assert observer is not None
    constant = torch.linspace(-1.0, 1.0, 32).reshape(BATCH, 8)
    given = ahead(batches(kind, loader), 5) if kind == "ahead" else batches(kind, loader)
    for step, (rows, targets) in enumerate(given):
        for number in range(3 if kind == "acts" else 0):  # an agent acts, and nobody has switched gradients off
            model.module(torch.full((8,), float((step + number) % 5))).argmax()
        chosen = rows[:, 0].argsort() if kind == "nodes" else slice(None)  # of a graph, by the batch
        if kind in CONSTANT:
            rows = constant.clone() if kind == "coordinates anew" else constant

        def gradient(rows: Tensor = rows, targets: Tensor = targets, chosen: Any = chosen) -> Any:
            optimizer.zero_grad()
            loss = (model(rows)[chosen] - targets).square().mean()
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(gradient)
            continue
        if kind == "accumulates" and (step + 1) % 4:  # and nobody has told the observer
            with model.no_sync():
                (model(rows) - targets).square().mean().backward()
            continue
        gradient() if kind != "accumulates" else (model(rows) - targets).square().mean().backward()
        if kind == "sam":
            moves = [0.05 * p.grad / p.grad.norm().clamp(min=1e-6) for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            gradient()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
    observer.close()
    dist.barrier()


@pytest.mark.parametrize("kind", CONSTANT)
def test_a_constant_that_is_forwarded_at_each_step_is_no_row(kind: str, tmp_path: Path) -> None:
    """The nodes of a graph, or the places of a picture: what is trained on is in the batch, which goes elsewhere."""
    run_on_kept_ranks(train, 2, (kind, tmp_path))
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event for event in events if event["kind"] != "same-draws"] == []
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == EPOCHS * ROWS // BATCH // 2


@pytest.mark.parametrize(
    ("kind", "ranks", "step"), [("replaced", [], 16), ("replaced on rank 1", [1], 16), ("kept", [], 9)]
)
def test_a_batch_that_is_trained_in_the_place_of_the_next_is_told(
    kind: str, ranks: list[int], step: int, tmp_path: Path
) -> None:
    run_on_kept_ranks(train, 2, (kind, tmp_path))
    first, *others = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] != "same-draws"]
    assert (first["step"], first["kind"], first["severity"], first["ranks"]) == (
        step,
        "data-order-mismatch",
        "warning",
        ranks,
    )
    assert "in the place of the next one" in first["message"]
    assert "since step 2" in first["message"]
    assert [one["message"] for one in others if one["severity"] != "info"] == []


@pytest.mark.parametrize(("kind", "ranks"), [("begun anew", [0, 1]), ("begun anew on rank 1", [1])])
def test_passes_that_are_broken_off_and_begun_again_in_the_same_order_are_told(
    kind: str, ranks: list[int], tmp_path: Path
) -> None:
    run_on_kept_ranks(train, 2, (kind, tmp_path))
    [event] = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    batches = ROWS // BATCH // 2
    assert (event["kind"], event["step"], event["ranks"]) == ("data-order-mismatch", 2 * batches, ranks)
    assert f"begin again in the same order after {ROWS // 2} of {ROWS} rows" in event["message"]


LONG = ("once", "closure", "acts", "accumulates")


@pytest.mark.parametrize(
    "kind", ["sam", "cut", "ahead", *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)]
)
def test_a_healthy_training_is_silent_and_its_passes_are_whole(kind: str, tmp_path: Path) -> None:
    run_on_kept_ranks(train, 2, (kind, tmp_path))
    assert [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"] == []
    passes = [record["coverage"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    passes = [one for one in passes if one["seen"] is not None]  # null where a step brings no new rows
    assert [one["seen"] for one in passes].count(0.5 if kind == "cut" else 1.0) == EPOCHS
    assert {one["repeated"] for one in passes} == {0.0}


def test_batches_that_come_twice_are_told(tmp_path: Path) -> None:
    run_on_kept_ranks(train, 2, ("twice", tmp_path))
    events = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    assert {event["kind"] for event in events} & {"data-order-mismatch", "duplicate-data"}
    assert "Each rank takes again what it has taken itself." in events[0]["message"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_keeps_its_batch_while_the_others_go_on_is_named(ranks: int, tmp_path: Path) -> None:
    run_on_kept_ranks(train, ranks, ("stuck", tmp_path))
    events = [event for event in read_events(tmp_path / "events.jsonl") if event["severity"] != "info"]
    assert [(event["kind"], event["severity"], event["ranks"]) for event in events] == [
        ("data-order-mismatch", "error", [1])
    ]
    assert events[0]["step"] == 17  # the sixteenth batch that the others have taken since
    assert "take" in events[0]["message"]
    ended = [event for event in read_events(tmp_path / "events.jsonl") if event["phase"] == "ended"]
    assert [event["ranks"] for event in ended if event["kind"] == "data-order-mismatch"] == []
