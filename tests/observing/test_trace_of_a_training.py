"""What a trace does beside its numbers: it changes nothing, survives a resume and a bad disk, knows what is null."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.frameworks.ddp import attach_ddp
from ds_silent.sinks.jsonl import read_metrics
from ds_silent.trace import Step, read_trace
from tests.frameworks.test_ddp_faults import signs
from tests.observing.test_traced_trainings import hash64
from tests.support.ddp_training import DDPCase, build
from tests.support.distributed import run_distributed, run_on_kept_ranks
from tests.support.traced_training import MICRO, STEPS, Cell, rows_of_step, train

# -- the training ------------------------------------------------------------------------------------------------------

KINDS = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "megatron", "megatron-distributed")
BF16 = ("ddp", "zero1", "zero2", "zero3")


def with_and_without(directory: str) -> list[tuple[str, str]]:
    cells = [Cell(kind) for kind in KINDS] + [Cell(kind, "bf16") for kind in BF16]
    return [
        (train(cell, f"{directory}/{place}").weights, train(Cell(cell.kind, cell.dtype, observed=False), "").weights)
        for place, cell in enumerate(cells)
    ]


@pytest.mark.long
def test_weights_have_the_same_bits_with_and_without_a_trace(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(with_and_without, 2, (str(tmp_path),), timeout=280)
    for place, outcomes in enumerate(zip(*ranks, strict=True)):
        assert len({one for outcome in outcomes for one in outcome}) == 1, place
        assert read_trace(tmp_path / str(place)).steps == tuple(range(1, STEPS + 1))
    for place, kind in enumerate(BF16, start=len(KINDS)):
        head = read_trace(tmp_path / str(place)).head
        assert head.tensors[0].dtype == "bfloat16"
        assert head.precision == "bf16", kind


def bf16_weights(directory: str) -> list[list[np.ndarray]]:
    cells = [Cell(kind, "bf16") for kind in ("zero1", "zero3")]
    return [[w for t in train(one, f"{directory}/{one.kind}").truths for w in t.weights] for one in cells]


def test_weights_in_use_are_those_in_low_precision_and_not_their_masters(tmp_path: Path) -> None:
    run_on_kept_ranks(bf16_weights, 2, (str(tmp_path),), timeout=100)
    for kind in ("zero1", "zero3"):
        for step in read_trace(tmp_path / kind):
            assert step.weights is not None
            assert torch.equal(torch.tensor(step.weights).bfloat16().float(), torch.tensor(step.weights))


# -- DDP in one process, as a script writes it -------------------------------------------------------------------------


class Loop:
    """A training of one rank or several under ``block``."""

    def __init__(self, directory: str | Path, block: dict[str, Any] | None = None, hook: Any = None):
        self.model, self.optimizer = build(DDPCase())
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        block = {"output_dir": str(directory), "tensorboard": False, "trace": {}} | (block or {})
        self.observer = attach_ddp(self.model, self.optimizer, block)
        assert self.observer is not None

    def steps(self, *numbers: int) -> Loop:
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            self.model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def close(self) -> dict[str, Any]:
        state: dict[str, Any] = self.observer.state_dict()
        self.observer.close()
        return state


def resumed(directory: str) -> None:
    """Taken are 1 to 5, with a checkpoint behind 3; then 4 to 6 once more."""
    loop = Loop(directory).steps(1, 2, 3)
    state, model = loop.observer.state_dict(), {k: v.clone() for k, v in loop.model.state_dict().items()}
    early = [step.step for step in read_trace(directory)] if dist.get_rank() == 0 else [1, 2, 3]
    assert early == [1, 2, 3]  # on disk, though nothing has told yet what the optimizer used of the third
    loop.steps(4, 5).close()
    loop = Loop(directory)
    loop.observer.load_state_dict(state)
    loop.model.load_state_dict(model)
    loop.steps(14, 15, 16).close()


def test_a_resume_writes_a_new_head_and_its_steps_retire_those_of_before(tmp_path: Path) -> None:
    run_on_kept_ranks(resumed, 2, (str(tmp_path),))
    trace = read_trace(tmp_path)
    assert trace.steps == (1, 2, 3, 4, 5, 6)
    assert len(trace.heads) == 2
    assert [step.head is trace.heads[1] for step in trace] == [False] * 3 + [True] * 3
    assert [step.samples for step in trace] == [2 * ROWS * number for number in range(1, 7)]
    assert [step.applied is not None for step in trace] == [True] * 5 + [False]
    lines = [line for line in (tmp_path / "trace.jsonl").read_text().splitlines() if '"trace":1' not in line]
    assert len(lines) == 9  # 1, 2, 3, 3 with what was applied, 4, 5, and 4, 5, 6


def test_interval_of_measurements_and_of_lines(tmp_path: Path) -> None:
    block = {"interval": 2, "trace": {"interval": 3, "size": 64}}
    run_on_kept_ranks(spaced, 2, (str(tmp_path), block))
    trace = read_trace(tmp_path)
    assert trace.steps == (6, 12)
    assert (trace.head.interval, trace.head.size) == (6, 64)
    assert [step.rows is not None and step.rows.count for step in trace] == [2 * ROWS] * 2  # of the step alone
    assert [step.applied is not None for step in trace] == [True, True]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4, 6, 8, 10, 12, 14]


def spaced(directory: str, block: dict[str, Any]) -> None:
    Loop(directory, block).steps(*range(1, 16)).close()


# -- rows --------------------------------------------------------------------------------------------------------------


def told(directory: str) -> None:
    train(Cell("ddp", told=True), directory)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_that_the_script_tells_are_hashed_whoever_has_which(ranks: int, tmp_path: Path) -> None:
    run_on_kept_ranks(told, ranks, (str(tmp_path),))
    for step in read_trace(tmp_path):
        _, ids = rows_of_step(Cell("ddp"), step.step)
        assert step.rows is not None
        assert (step.rows.count, step.rows.by) == (len(ids), "ids")
        assert step.rows.hash == hash64(ids[::-1])


def test_all_rows_are_hashed_where_only_a_sample_of_the_ids_travels(tmp_path: Path) -> None:
    run_on_kept_ranks(sampled_rows, 2, (str(tmp_path),))
    for step in read_trace(tmp_path):
        assert step.rows is not None
        assert (step.rows.count, step.rows.hash) == (MICRO * ROWS, hash64(rows_of_step(Cell("ddp"), step.step)[1]))


def sampled_rows(directory: str) -> None:
    from ds_silent.exchange import row_ids

    with patch.object(row_ids, "MAX_BYTES", 64):
        train(Cell("ddp", told=True), directory)
    records = read_metrics(Path(directory, "metrics.jsonl")) if dist.get_rank() == 0 else []
    assert all(record["coverage"]["sampled"] < 1.0 for record in records)


# -- what cannot be known ----------------------------------------------------------------------------------------------


def null(directory: str) -> None:
    Loop(f"{directory}/rows", {"coverage": False}).steps(1, 2).close()
    Loop(f"{directory}/lossy", hook=signs).steps(1, 2).close()
    loop = Loop(f"{directory}/nan").steps(1)
    with torch.no_grad():
        loop.model.module.embedding.weight[0, 0] = float("nan")
    loop.steps(2, 3).close()
    loop = Loop(f"{directory}/compiled")
    loop.model.module.layers[0].compile(backend="eager")
    loop.steps(1, 2).close()
    loop = Loop(f"{directory}/not aggregated", {"integrity": {"aggregation": False}})
    loop.steps(1, 2).close()


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    run_distributed(null, 2, (str(tmp_path),))  # where others trained before, torch does not compile a layer

    def steps(name: str) -> list[Step]:
        return list(read_trace(tmp_path / name))

    assert all(step.rows is None and step.local is not None for step in steps("rows"))
    assert all(step.reduced is None and step.local is not None for step in steps("lossy"))
    compiled = read_trace(tmp_path / "compiled").head
    assert all(tensor.order is None for tensor in compiled.tensors)
    broken = steps("nan")[1]
    assert broken.local is not None
    assert np.isnan(broken.local.norm)
    assert np.isnan(broken.local.sketch).any()
    assert broken.weights is not None
    assert (steps("nan")[0].rows, broken.loss) == (steps("lossy")[0].rows, pytest.approx(float("nan"), nan_ok=True))
    unchecked = steps("not aggregated")[0]
    assert unchecked.local is not None
    assert unchecked.reduced is not None
    assert np.allclose(unchecked.local.layer_sketches, unchecked.reduced.layer_sketches, rtol=1e-4, atol=1e-5)


# -- the order of the first forward ------------------------------------------------------------------------------------


class Backwards(nn.Module):
    """Its modules are used in the opposite order; one never, one twice; the last parameter is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))
        self.last, self.first, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.last(self.first(values))
        return (self.first(hidden) * self.own).square().mean()


def ordered(directory: str) -> list[int]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(Backwards(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = attach_ddp(model, optimizer, {"output_dir": directory, "tensorboard": False, "trace": {}})
    hooks = []

    def count(*_: Any) -> None:
        hooks.append(sum(len(module._forward_pre_hooks) for module in (model.module.first, model.module.last)))

    model.module.register_forward_pre_hook(count)
    with torch.no_grad():
        model.module(torch.ones(2, 4))  # no training forward
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    count()
    observer.close()  # type: ignore[union-attr]
    return hooks


def test_the_order_is_that_of_the_first_forward_whose_hooks_are_gone_behind_it(tmp_path: Path) -> None:
    hooks = run_on_kept_ranks(ordered, 1, (str(tmp_path),))[0]
    head = read_trace(tmp_path).head
    orders = {tensor.name: tensor.order for tensor in head.tensors}
    assert orders == {
        "own": 0,
        "first.weight": 1,
        "first.bias": 2,
        "last.weight": 3,
        "last.bias": 4,
        "never.weight": None,
        "never.bias": None,
    }
    assert hooks == [0, 2, 0, 0]  # none without gradients; then in the first forward only


# -- a sink that breaks ------------------------------------------------------------------------------------------------


def unwritable(directory: str) -> tuple[int, str]:
    said = []
    logging.getLogger("ds_silent").addHandler(logging.Handler())
    logging.getLogger("ds_silent").handlers[-1].emit = lambda record: said.append(record.getMessage())  # type: ignore
    Path(directory, "trace.jsonl").mkdir(parents=True)
    loop = Loop(directory).steps(1, 2, 3)
    loop.close()
    return loop.observer.step or 0, "\n".join(said)


def test_a_trace_that_cannot_be_written_leaves_records_and_training_alone(tmp_path: Path) -> None:
    [(steps, said)] = run_on_kept_ranks(unwritable, 1, (str(tmp_path),))
    assert steps == 3
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert "TraceSink stops writing for the rest of this run, the training goes on" in said


def test_without_the_key_nothing_of_it_is_there(tmp_path: Path) -> None:
    run_on_kept_ranks(untraced, 1, (str(tmp_path),))
    assert not (tmp_path / "trace.jsonl").exists()


def untraced(directory: str) -> None:
    loop = Loop(directory, {"trace": None}).steps(1, 2)
    assert loop.observer._capture.traced is None
    assert loop.observer._steps._layout.weights == loop.observer._steps._layout.rows == 0
    loop.close()
