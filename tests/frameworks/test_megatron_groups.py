"""Megatron-core's other groups and factors on two ranks: each healthy, and with one thing wrong that must be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY, Probe
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.megatron_training import MegatronCase, build_gpt, parallel, step_gpt, wrap

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS = 3


@contextmanager
def averages(right: bool = True) -> Iterator[None]:
    """gloo cannot average in a collective: here it divides and adds up, or forgets to divide."""
    original = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.AVG:
            tensor.div_(dist.get_world_size(group) if right else 1)
            op = dist.ReduceOp.SUM
        return original(tensor, op=op, group=group, async_op=async_op)

    with patch.object(dist, "all_reduce", all_reduce):
        yield


@contextmanager
def undercounted() -> Iterator[None]:
    """The norm that the gradients are clipped by lacks a part of the model."""
    from megatron.core.optimizer import optimizer

    original = optimizer.clip_grad_by_total_norm_fp32

    def clip(*args: Any, total_norm: float, **kwargs: Any) -> None:
        original(*args, total_norm=0.7 * total_norm, **kwargs)

    with patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip):
        yield


def times(factor: float, experts: bool = False) -> Callable[[Any], Any]:
    """A wrong factor on all buckets, or on those of the experts."""

    def fault(chunk: Any) -> Any:
        for group in chunk.expert_parallel_bucket_groups if experts else chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= factor
        return nullcontext()

    return fault


@dataclass(frozen=True)
class Scenario:
    """What is trained; what goes wrong, and the kind of the first event: None is healthy."""

    sizes: dict[str, int] = field(default_factory=dict)  # of groups
    case: MegatronCase = field(default_factory=MegatronCase)
    experts: str | None = None  # "apart": in their own group; "together": in that of all other parameters
    gpt: bool = False  # Megatron's own layers under tensor and sequence parallelism
    fault: Callable[[Any], Any] = lambda chunk: nullcontext()
    kind: str | None = None


CONTEXT, EXPERTS = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
CLIPPED = MegatronCase(clipping=0.1, accumulation=2)
SCENARIOS = {
    "context": Scenario(CONTEXT),
    "context, divided by the data-parallel ranks alone": Scenario(CONTEXT, fault=times(2.0), kind="aggregation-error"),
    "experts": Scenario(EXPERTS, experts="apart"),
    "experts, distributed optimizer": Scenario(EXPERTS, MegatronCase(distributed=True, clipping=0.1), experts="apart"),
    "experts, divided by those that share them": Scenario(
        EXPERTS, experts="apart", fault=times(2.0, experts=True), kind="aggregation-error"
    ),
    "experts in the group of all": Scenario(EXPERTS, experts="together", kind="initial-weights-mismatch"),
    "average": Scenario(case=MegatronCase(average=True), fault=lambda chunk: averages()),
    "average that only adds up": Scenario(
        case=MegatronCase(average=True), fault=lambda chunk: averages(right=False), kind="aggregation-error"
    ),
    "per token": Scenario(case=MegatronCase(per_token=True)),
    "per token, divided too": Scenario(case=MegatronCase(per_token=True), fault=times(0.5), kind="aggregation-error"),
    "sequence": Scenario({"tensor": 2}, CLIPPED, gpt=True),
    "sequence, a norm of a part": Scenario(
        {"tensor": 2}, CLIPPED, gpt=True, fault=lambda chunk: undercounted(), kind="aggregation-error"
    ),
}


def train_all(directory: str) -> None:
    """On every rank."""
    for name, scenario in SCENARIOS.items():
        with parallel(**scenario.sizes):
            train(scenario, Path(directory, name))


def train(scenario: Scenario, directory: Path) -> None:
    case, rank = scenario.case, dist.get_rank()
    if scenario.gpt:
        chunks, optimizer, _ = build_gpt(2, 1, None, case, sequence=True)
    else:
        module = module_of(scenario.experts)
        chunks, optimizer = wrap([module], case)
        if scenario.experts:
            with torch.no_grad():  # each rank has other ones, which nobody broadcasts
                for parameter in module.sometimes.parameters():
                    parameter.add_(0.1 * rank)
    generator = torch.Generator().manual_seed(0 if scenario.gpt else rank)
    block = {"output_dir": str(directory), "tensorboard": False, "integrity": {"replica_interval": 1}}
    with scenario.fault(chunks[0]), ds_silent.observe(chunks, optimizer, block, accumulation=case.accumulation):
        for _ in range(STEPS):
            if scenario.gpt:
                step_gpt(chunks, optimizer, case, generator)
                continue
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
            optimizer.scale_loss(chunks[0](tokens, False)).backward()
            chunks[0].finish_grad_sync()
            optimizer.step()
            chunks[0].zero_grad_buffer()


def module_of(experts: str | None) -> Probe:
    torch.manual_seed(1)
    module = Probe(None)
    if experts:
        for parameter in module.sometimes.parameters():
            parameter.allreduce = experts == "together"  # type: ignore[attr-defined]
    return module


@pytest.mark.long
def test_what_is_right_is_not_told_and_what_is_wrong_is(tmp_path: Path) -> None:
    run_distributed(train_all, 2, (str(tmp_path),), timeout=280)
    for name, scenario in SCENARIOS.items():
        for part in ("tp0", "tp1") if scenario.gpt else (".",):
            records = list(read_metrics(tmp_path / name / part / "metrics.jsonl"))
            assert [record["step"] for record in records] == list(range(1, STEPS + 1)), name
            events = [one for one in read_events(tmp_path / name / part / "events.jsonl") if one["severity"] != "info"]
            kinds = [event["kind"] for event in events[:1]]
            assert kinds == ([] if scenario.kind is None else [scenario.kind]), (name, part, events)
            ranks = 1 if scenario.gpt else 2
            rows = ROWS * scenario.case.accumulation * (1 if scenario.sizes == CONTEXT else ranks)
            assert [record["samples"] for record in records] == [rows * step for step in range(1, STEPS + 1)], name
            if scenario.kind is None:
                found = [record["integrity"] for record in records]
                assert all(one["relative_error"] < one["rounding_bound"] < 2.0**-20 for one in found), name
                assert all(one["replica_groups"] == [list(range(ranks))] for one in found), name
