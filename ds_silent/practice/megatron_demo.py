"""Megatron-core trainings of a small GPT on CPU ranks, each with one thing wrong that happened to somebody, in a table.

Started as ``launch/demo_megatron.py``, it launches itself with torchrun as the ranks' worker: all scenarios share one
process group. The faults are those of public issues of Megatron-LM, made again in this process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ds_silent.extras import MissingExtra, needs
from ds_silent.practice.megatron_gpt import Shape

RANKS, STEPS, MICRO_BATCHES, ROWS, LENGTH, VOCABULARY = 4, 5, 2, 4, 32, 128
OUTPUT = Path("runs/demo-megatron")
WORKER = "--worker"
Fault = Callable[[Any], AbstractContextManager[Any]]
"""Of the first chunk, once it is wrapped: what is wrong until the training ends."""


def _right(chunk: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _factor(times: float, experts: bool = False) -> Fault:
    def fault(chunk: Any) -> AbstractContextManager[Any]:
        for group in chunk.expert_parallel_bucket_groups if experts else chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= times
        return nullcontext()

    return fault


def _drop_bucket(chunk: Any) -> AbstractContextManager[Any]:
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    original, dropped = Group.start_grad_sync, chunk.bucket_groups[1]

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not dropped:
            return original(self, *args, **kwargs)
        self.grad_reduce_handle = dist.barrier(group=chunk.dp_cp_group, async_op=True)
        return None

    return patch.object(Group, "start_grad_sync", start_grad_sync)


def _without(name: str) -> Fault:
    """A part of ``finalize_model_grads`` that does nothing."""

    def fault(chunk: Any) -> AbstractContextManager[Any]:
        import importlib

        module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        return patch.object(module, name, lambda *args, **kwargs: None)

    return fault


def _smaller_norm(chunk: Any) -> AbstractContextManager[Any]:
    from megatron.core.optimizer import optimizer

    original = optimizer.clip_grad_by_total_norm_fp32

    def clip(*args: Any, total_norm: float, **kwargs: Any) -> None:
        original(*args, total_norm=0.7 * total_norm, **kwargs)

    return patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip)


@dataclass(frozen=True)
class Scenario:
    """One training."""

    title: str
    name: str  # of its directory
    shape: Shape = field(default_factory=Shape)
    fault: Fault = _right
    expected: str | None = None  # kind of the first event; None: none
    issue: str = ""  # of NVIDIA/Megatron-LM
    distributed: bool = False  # optimizer
    late: bool = False  # a layer becomes trainable when the model is wrapped
    same_rows: bool = False


TENSOR, PIPELINE = Shape(tensor=2, sequence=True), Shape(pipeline=2)
SCENARIOS = (
    Scenario("healthy, TP 2 x DP 2", "healthy-tensor", TENSOR, distributed=True),
    Scenario("healthy, PP 2 x DP 2, tied", "healthy-pipeline", PIPELINE, distributed=True),
    Scenario("healthy, EP 2 in DP 4", "healthy-experts", Shape(experts=2)),
    Scenario("no division by DP", "no-division", TENSOR, _factor(2.0), "aggregation-error", "#3023"),
    Scenario("experts divided by their own group", "experts", Shape(experts=2), _factor(2.0, experts=True),
             "aggregation-error", "#7165"),
    Scenario("a bucket that is not reduced", "bucket", Shape(), _drop_bucket, "unreduced-gradient"),
    Scenario("layer norms of a TP rank not reduced", "layer-norms", TENSOR,
             _without("_allreduce_non_tensor_model_parallel_grads"), "replica-drift", "#1446"),
    Scenario("embeddings of PP not tied", "embeddings", PIPELINE, _without("_allreduce_word_embedding_grads"),
             "replica-drift", "#656"),
    Scenario("parameters in no buffer", "no-buffer", Shape(), _right, "unreduced-gradient", "#565", late=True),
    Scenario("a norm of a part of the model", "norm", TENSOR, _smaller_norm, "aggregation-error", "#5916"),
    Scenario("the same rows on all ranks", "same-rows", Shape(), _right, "duplicate-data", "#7299", same_rows=True),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """The process's exit code; ``arguments`` as in ``sys.argv``."""
    try:
        needs("make demo-megatron", "megatron")
    except MissingExtra as error:
        print(f"ds_silent: {error}", file=sys.stderr)
        return 1
    if WORKER in arguments[1:]:
        return _worker()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    print(f"demo: {len(SCENARIOS)} scenarios x {STEPS} steps on {RANKS} CPU ranks, into {OUTPUT} ...", flush=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), arguments[0], WORKER]
    code = subprocess.run([sys.executable, *launch], env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode
    if code:
        print(f"demo: the training ended with exit code {code}; its reason stands above", file=sys.stderr)
        return code
    return _report()


def _report() -> int:
    from rich.console import Console
    from rich.table import Table

    from ds_silent.sinks.jsonl import read_events, read_metrics

    table = Table("scenario", "Megatron-LM", "first told", "at step", "where", "reduction's error", "as expected")
    wrong = 0
    for scenario in SCENARIOS:
        events = [
            event for path in sorted(OUTPUT.glob(f"{scenario.name}/**/events.jsonl")) for event in read_events(path)
        ]
        records = [one for path in OUTPUT.glob(f"{scenario.name}/**/metrics.jsonl") for one in read_metrics(path)]
        told = [event for event in events if event["severity"] != "info"]
        first = min(told, key=lambda event: event["step"], default=None)
        errors = [record["integrity"]["relative_error"] for record in records]
        right = (None if first is None else first["kind"]) == scenario.expected and bool(records)
        wrong += not right
        table.add_row(
            scenario.title,
            scenario.issue,
            "nothing" if first is None else first["kind"],
            "" if first is None else str(first["step"]),
            "" if first is None else str(first["where"] or first["ranks"]),
            f"{max((error for error in errors if error is not None), default=0.0):.1e}",
            "yes" if right else f"no: {scenario.expected or 'nothing'}",
        )
    console = Console(soft_wrap=True)
    Console(width=max(console.width, 150)).print(table)
    if wrong:
        print(f"demo: {wrong} of {len(SCENARIOS)} scenarios were not told as expected", file=sys.stderr)
    return 1 if wrong else 0


def _files(scenario: Scenario, kind: str) -> list[Path]:
    """Of all data-parallel groups."""
    return sorted((OUTPUT / scenario.name).glob(f"**/{kind}.jsonl"))


def _worker() -> int:
    import torch.distributed as dist

    from ds_silent.practice.megatron_gpt import parallel

    dist.init_process_group("gloo")
    for number, scenario in enumerate(SCENARIOS, start=1):
        if dist.get_rank() == 0:
            print(f"demo: {number} of {len(SCENARIOS)}: {scenario.title}", flush=True)
        sizes = {"expert_model_parallel_size": scenario.shape.experts} if scenario.shape.experts else {}
        with parallel(scenario.shape.tensor, scenario.shape.pipeline, **sizes):
            _train(scenario)
        dist.barrier()
    dist.destroy_process_group()
    return 0


def _train(scenario: Scenario) -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import ds_silent
    from ds_silent.practice.megatron_gpt import gpt_models, take_step

    torch.manual_seed(1)
    [model], config = gpt_models(scenario.shape, VOCABULARY, LENGTH)
    distributed = scenario.distributed
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=20000
    )
    late = [p for name, p in model.named_parameters() if scenario.late and "layers.1" in name]
    for parameter in late:
        parameter.requires_grad_(False)
    chunk = DistributedDataParallel(config, options, model)
    chunk.broadcast_params()
    for parameter in late:
        parameter.requires_grad_(True)
    settings = OptimizerConfig(lr=1e-3, clip_grad=0.5, use_distributed_optimizer=distributed)
    optimizer = get_megatron_optimizer(settings, [chunk])
    block = {"output_dir": str(OUTPUT / scenario.name), "tensorboard": False, "integrity": {"replica_interval": 1}}
    share, shares = (0, 1) if scenario.same_rows else (chunk.dp_group.rank(), chunk.dp_group.size())
    batches = _batches(share, shares)
    with ExitStack() as stack:
        stack.enter_context(scenario.fault(chunk))
        stack.enter_context(ds_silent.observe([chunk], optimizer, block, accumulation=MICRO_BATCHES))
        for _ in range(STEPS):
            take_step([chunk], optimizer, batches, MICRO_BATCHES, (ROWS, LENGTH))


def _batches(share: int, shares: int) -> Iterator[Any]:
    """Bytes of the embedded instructions, this rank's share of the rows, over and over."""
    import torch

    from ds_silent.finetune.instructions import generate

    texts = [" ".join(row.values()).encode() for row in generate(256)][share::shares]
    rows = torch.tensor([list(text[:LENGTH].ljust(LENGTH)) for text in texts]) % VOCABULARY
    while True:
        for first in range(0, len(rows), ROWS):
            yield rows[first : first + ROWS]
