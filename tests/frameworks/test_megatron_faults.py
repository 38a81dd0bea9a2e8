"""What is told of Megatron-core trainings in which something is wrong, and how what cannot be observed is refused."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.config import ConfigError
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.megatron_training import MegatronCase, build, parallel

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS = 5


def drop_a_bucket(chunk: Any) -> Any:
    """The reduction of one bucket does nothing."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    original, dropped = Group.start_grad_sync, chunk.bucket_groups[1]

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not dropped:
            return original(self, *args, **kwargs)
        self.grad_reduce_handle = dist.barrier(async_op=True)
        return None

    return patch.object(Group, "start_grad_sync", start_grad_sync)


def scale_wrongly(chunk: Any) -> Any:
    """Half as much again, of every bucket: what the bucket says of its factor is wrong."""
    for group in chunk.bucket_groups:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor *= 1.5
    return nullcontext()


def healthy(chunk: Any) -> Any:
    return nullcontext()


FAULTS: dict[str, tuple[bool, Callable[[Any], Any], str | None]] = {
    "healthy": (False, healthy, None),
    "healthy, distributed optimizer": (True, healthy, None),
    "a bucket that is not reduced": (False, drop_a_bucket, "unreduced-gradient"),
    "a bucket that is not reduced, distributed optimizer": (True, drop_a_bucket, "aggregation-error"),
    "a factor times 1.5": (False, scale_wrongly, "aggregation-error"),
    "a factor times 1.5, distributed optimizer": (True, scale_wrongly, "aggregation-error"),
}
"""(the distributed optimizer, what goes wrong, the kind of the first event that is no note; None: nothing is told)."""


def train_all(directory: str) -> dict[str, dict[str, Any]]:
    """On every rank; what rank 0 has written."""
    with parallel():
        return {name: train(Path(directory, str(number)), name) for number, name in enumerate(FAULTS)}


def train(directory: Path, name: str) -> dict[str, Any]:
    distributed, fault, _ = FAULTS[name]
    chunk, optimizer = build(MegatronCase(overlap=True, distributed=distributed))
    generator = torch.Generator().manual_seed(dist.get_rank())
    with fault(chunk), ds_silent.observe(chunk, optimizer, config={"output_dir": str(directory), "tensorboard": False}):
        for _ in range(STEPS):
            chunk(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            chunk.finish_grad_sync()
            optimizer.step()
            chunk.zero_grad_buffer()
    alive = weakref.ref(chunk)
    del chunk, optimizer
    end = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end:
        gc.collect()  # returns at once while another thread collects: the worker's took the time of five of these
        time.sleep(0.01)
    return {**written(directory), "freed": alive() is None}


def written(directory: Path) -> dict[str, Any]:
    if dist.get_rank():
        return {}
    events = [event for event in read_events(directory / "events.jsonl") if event["severity"] != "info"]
    return {"events": events, "records": list(read_metrics(directory / "metrics.jsonl"))}


def test_what_is_wrong_is_told_as_it_is(tmp_path: Path) -> None:
    found = run_distributed(train_all, 4, (str(tmp_path),), timeout=280)[0]
    for name, (_, _, kind) in FAULTS.items():
        records, events = found[name]["records"], found[name]["events"]
        assert found[name]["freed"], f"{name}: a model whose observer was closed is kept alive"
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), name
        first = [(event["kind"], event["step"]) for event in events[:1]]
        assert first == ([] if kind is None else [(kind, 1)]), (name, events)


def stands_for(**members: Any) -> Any:
    """What has the members of Megatron's wrapper that are looked at before anything communicates."""
    kept = {"buffers": [], "bucket_groups": [], "expert_parallel_buffers": [], "dp_cp_group": None}
    kept |= {"finish_grad_sync": None, "tp_group": None, "ddp_config": SimpleNamespace(use_megatron_fsdp=False)}
    return SimpleNamespace(**{name: value for name, value in (kept | members).items() if value is not ...})


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (stands_for(ddp_config=SimpleNamespace(use_megatron_fsdp=True)), "cannot observe Megatron-FSDP"),
        (stands_for(dp_cp_group=...), "got SimpleNamespace without dp_cp_group"),
        (stands_for(tp_group=...), r"megatron-core 0.15 or newer, .* without tp_group of megatron-core \d"),
        ([], "or a list of them, got NoneType"),
        ([stands_for()], "needs what get_megatron_optimizer has returned, got SGD"),
    ],
)
def test_what_cannot_be_observed_is_refused_in_one_sentence(model: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ds_silent.attach_megatron(model, torch.optim.SGD([torch.zeros(1)], lr=1.0))
