"""Train a small GPT of Megatron-core's own layers on 4 CPU ranks, healthy and with faults of public issues.

python launch/demo_megatron.py   # what `make demo-megatron` runs; records in runs/demo-megatron

It launches itself with torchrun as the ranks' worker: all scenarios share one process group.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from ds_silent.extras import MissingExtra, needs
from megatron_issues import SCENARIOS as ISSUES
from megatron_issues import Scenario, training_of

RANKS, STEPS = 4, 5
OUTPUT = Path("runs/demo-megatron")
WORKER = "--worker"


def _drop_bucket(chunk: Any) -> AbstractContextManager[Any]:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    original, dropped = Group.start_grad_sync, chunk.bucket_groups[1]

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not dropped:
            return original(self, *args, **kwargs)
        self.grad_reduce_handle = dist.barrier(group=chunk.dp_cp_group, async_op=True)
        return None

    return patch.object(Group, "start_grad_sync", start_grad_sync)


BUCKET = Scenario("a bucket that is not reduced", "healthy-plain", fault=_drop_bucket, expected="unreduced-gradient")
SCENARIOS = {**ISSUES, "bucket": BUCKET}


def main(arguments: list[str]) -> int:
    """Train all scenarios and print what was reported; return the exit code. ``arguments`` as in ``sys.argv``."""
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
    for name, scenario in SCENARIOS.items():
        events = [event for path in _files(name, "events") for event in read_events(path)]
        records = [record for path in _files(name, "metrics") for record in read_metrics(path)]
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


def _files(name: str, kind: str) -> list[Path]:
    """Of all data-parallel groups of a scenario."""
    return sorted((OUTPUT / name).glob(f"**/{kind}.jsonl"))


def _worker() -> int:
    dist.init_process_group("gloo")
    for number, (name, scenario) in enumerate(SCENARIOS.items(), start=1):
        if dist.get_rank() == 0:
            print(f"demo: {number} of {len(SCENARIOS)}: {scenario.title}", flush=True)
        block = {"output_dir": str(OUTPUT / name), "tensorboard": False, "integrity": {"replica_interval": 1}}
        with training_of(scenario, block) as training:
            for _ in range(STEPS):
                training.step()
        dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
