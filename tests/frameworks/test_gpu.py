"""On a GPU, with NCCL: nothing is changed, nothing waits for the device, and a fault is told.

Two ranks share one device where there is only one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCRIPT = Path(__file__).with_name("gpu_training.py")
TRAININGS = [
    ("ddp", "fp32"),
    ("ddp", "autocast"),
    ("ddp", "bf16"),
    ("fsdp2", "fp32"),
    ("fsdp2", "bf16"),
    ("zero0", "fp32"),
    ("zero1", "bf16"),
    ("zero2", "bf16"),
    ("zero3", "bf16"),
]


def trained(framework: str, dtype: str, *arguments: str) -> list[dict[str, Any]]:
    """What each rank says at its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "localhost:0", str(SCRIPT), "--framework", framework, "--dtype", dtype, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reads = json.JSONDecoder().raw_decode  # two ranks may write into one line
    said = [reads(text)[0] for text in done.stdout.split("RESULT ")[1:]]
    return sorted(said, key=lambda one: one["rank"])


def events(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(("framework", "dtype"), TRAININGS)
def test_nothing_is_changed_and_nothing_waits(framework: str, dtype: str, tmp_path: Path) -> None:
    if framework.startswith("zero"):
        pytest.importorskip("deepspeed")
    plain = trained(framework, dtype)
    observed = trained(framework, dtype, "--observe", "--output-dir", str(tmp_path))
    assert [one["digest"] for one in observed] == [one["digest"] for one in plain]
    assert [one["waits"] for one in observed] == [[], []]
    assert events(tmp_path) == []
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 41))
    assert all(record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"] for record in records)


@pytest.mark.parametrize(
    ("fault", "framework", "kind", "step"),
    [
        ("rows", "ddp", "duplicate-data", 1),
        ("rows", "fsdp2", "duplicate-data", 1),
        ("loss", "ddp", "objective-mismatch", 12),
        ("loss", "zero1", "objective-mismatch", 12),
        ("reduced", "ddp", "aggregation-error", 12),
        ("drift", "ddp", "replica-drift", 20),
    ],
)
def test_a_fault_is_told(fault: str, framework: str, kind: str, step: int, tmp_path: Path) -> None:
    if framework.startswith("zero"):
        pytest.importorskip("deepspeed")
    trained(framework, "bf16", "--observe", "--output-dir", str(tmp_path), "--fault", fault)
    found = [(one["kind"], one["severity"], one["step"]) for one in events(tmp_path)]
    assert found[0][:2] == (kind, "error"), found
    assert found[0][2] <= step
