"""Megatron-core's own GPT under its own schedules: tensor, pipeline and interleaved parallelism, losses per token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS
from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.frameworks.test_oracle import chunks as in_parts
from tests.support.distributed import run_distributed
from tests.support.megatron_training import MegatronCase, build_gpt, parallel, step_gpt

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS, RANKS = 4, 4


@dataclass(frozen=True)
class Shape:
    """Of one training; ``harmed``: the first parameter of this name is changed on the last rank, after step 1."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    case: MegatronCase = field(default_factory=lambda: MegatronCase(accumulation=2))
    harmed: str | None = None
    sequence: bool = False


SHAPES = {
    "tensor": Shape(tensor=2),
    "tensor, sequence, clipped": Shape(
        tensor=2, case=MegatronCase(accumulation=2, clipping=0.1, distributed=True), sequence=True
    ),
    "pipeline, clipped": Shape(pipeline=2, case=MegatronCase(accumulation=2, clipping=0.1)),
    "tensor, a layer norm apart": Shape(tensor=2, harmed="input_layernorm.weight"),
    "pipeline": Shape(pipeline=2),
    "pipeline, embeddings apart": Shape(pipeline=2, harmed="output_layer.weight"),
    "interleaved": Shape(pipeline=2, virtual=2, case=MegatronCase(accumulation=4, distributed=True, overlap=True)),
    "per token": Shape(case=MegatronCase(accumulation=2, per_token=True, clipping=0.1)),
}


def train_all(directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    """On every rank: the hashes of the weights, observed and not."""
    found = {}
    for name in names:
        shape = SHAPES[name]
        with parallel(shape.tensor, shape.pipeline, shape.virtual):
            observed = train(shape, Path(directory, name))
            found[name] = observed, observed if shape.harmed else train(shape, None)
    return found


def train(shape: Shape, directory: Path | None) -> str:
    chunks, optimizer, _ = build_gpt(shape.tensor, shape.pipeline, shape.virtual, shape.case, shape.sequence)
    observer = None
    if directory is not None:
        block = {"output_dir": str(directory), "tensorboard": False, "integrity": {"replica_interval": 1}}
        observer = ds_silent.attach(chunks, block, optimizer=optimizer, accumulation=shape.case.accumulation)
    generator = torch.Generator().manual_seed(chunks[0].dp_group.rank())
    for step in range(STEPS):
        step_gpt(chunks, optimizer, shape.case, generator)
        if shape.harmed and step == 0:
            harm(chunks, shape.harmed)
        dist.barrier()  # the groups leave what others look for before these look the next time
    if observer is not None:
        observer.close()
    return hash_of(parameter.detach() for chunk in chunks for parameter in chunk.module.parameters())


def harm(chunks: list[Any], name: str) -> None:
    """On all data-parallel ranks of the last tensor- or pipeline-parallel rank: these are alike among each other."""
    last = chunks[0].tp_group.rank() == chunks[0].tp_group.size() - 1
    if last and chunks[0].pp_group.rank() == chunks[0].pp_group.size() - 1:
        named = (p for chunk in chunks for own, p in chunk.module.named_parameters() if name in own)
        with torch.no_grad():
            next(named).mul_(1.01)


@pytest.mark.parametrize("names", in_parts(tuple(SHAPES), 2), ids=lambda names: names[0])
@pytest.mark.long
def test_each_data_parallel_group_is_observed_by_itself(names: tuple[str, ...], tmp_path: Path) -> None:
    results = run_distributed(train_all, RANKS, (str(tmp_path), names), timeout=280)
    for name in names:
        shape = SHAPES[name]
        for rank, found in enumerate(results):
            assert found[name][0] == found[name][1], (name, rank)
        parts = [f"tp{rank}" for rank in range(shape.tensor)] if shape.tensor > 1 else []
        parts = [f"pp{rank}" for rank in range(shape.pipeline)] if shape.pipeline > 1 else parts
        told = []
        for part in parts or ["."]:
            records = list(read_metrics(tmp_path / name / part / "metrics.jsonl"))
            assert [record["step"] for record in records] == list(range(1, STEPS + 1)), (name, part)
            ranks = RANKS // (shape.tensor * shape.pipeline)
            for record in records:
                check(record, shape, ranks)
            told += [each for each in read_events(tmp_path / name / part / "events.jsonl") if is_fault(each)]
        if shape.harmed is None:
            assert told == [], name
        else:
            assert [(event["kind"], event["step"]) for event in told] == [("replica-drift", 2)], (name, told)
            assert "layernorm" in told[0]["where"] or "embedding" in told[0]["where"], told


def check(record: dict[str, Any], shape: Shape, ranks: int) -> None:
    assert record["world_size"] == ranks
    assert record["samples"] == record["step"] * ROWS * shape.case.accumulation * ranks
    assert 0.0 < record["integrity"]["relative_error"] < record["integrity"]["rounding_bound"] < 16 * 2.0**-24
    assert record["integrity"]["replica_groups"] == [list(range(ranks))]
    losses = record["loss"]["per_rank"]
    assert all(3.0 < loss < 6.0 for loss in losses)


def is_fault(event: dict[str, Any]) -> bool:
    return event["severity"] != "info" or event["kind"] == "gradient-changed"


MICRO_BATCHES = 3


def train_with_own_loss(directory: str) -> None:
    """On every rank: losses that the schedule divides by the micro-batches, and losses that the script has divided."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(dist.get_rank())
    for times in (1, MICRO_BATCHES):
        with parallel(1, 1, None):
            chunks, optimizer, _ = build_gpt(1, 1, None, MegatronCase(accumulation=MICRO_BATCHES))

            def forward_step(data: Any, model: Any, times: int = times) -> tuple[Any, Any]:
                tokens = torch.randint(0, 50, (ROWS, LENGTH), generator=generator)
                mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

                def loss_function(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
                    return loss / times, {}

                return model(tokens, torch.arange(LENGTH).expand(ROWS, LENGTH), mask), loss_function

            block = {"output_dir": f"{directory}/{times}", "tensorboard": False}
            with ds_silent.observe(chunks, optimizer, config=block, accumulation=MICRO_BATCHES):
                for _ in range(STEPS):
                    get_forward_backward_func()(
                        forward_step_func=forward_step,
                        data_iterator=None,
                        model=chunks,
                        num_microbatches=MICRO_BATCHES,
                        seq_length=LENGTH,
                        micro_batch_size=ROWS,
                        forward_only=False,
                    )
                    optimizer.step()
                    chunks[0].zero_grad_buffer()


def test_a_loss_that_the_schedule_and_the_script_divide_is_told_at_its_first_step(tmp_path: Path) -> None:
    run_distributed(train_with_own_loss, 2, (str(tmp_path),), timeout=200)
    for times in (1, MICRO_BATCHES):
        records = list(read_metrics(tmp_path / str(times) / "metrics.jsonl"))
        assert [record["objective"]["weight_sum"] for record in records] == pytest.approx([1 / times] * STEPS, rel=1e-5)
        told = [event for event in read_events(tmp_path / str(times) / "events.jsonl") if is_fault(event)]
        assert [(e["kind"], e["severity"], e["step"]) for e in told] == (
            [] if times == 1 else [("objective-mismatch", "warning", 1)]
        )
        assert times == 1 or "Megatron-core's schedule promises the mean" in told[0]["message"]
