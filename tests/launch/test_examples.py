"""Each example as it stands, by its launcher; and how little of it is ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.frameworks.test_ways_in import free_port
from tests.support.interpreter import interpreter

EXAMPLES = Path(__file__).resolve().parents[2] / "launch" / "examples"
OURS = 15  # lines beyond an unobserved script, at most


ONE_NODE = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCHERS = {
    "ddp": ["torchrun", "--standalone", "--nproc_per_node", "2"],
    "fsdp2": ["torchrun", "--standalone", "--nproc_per_node", "2"],
    # on the CPU too: --cpu starts one process
    "accelerate_loop": ["accelerate", "launch", "--multi_gpu", *ONE_NODE, "--main_process_port"],
    "deepspeed_loop": ["deepspeed", "--num_gpus", "2", "--master_port"],
}


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.long
def test_an_example_trains_and_is_observed(name: str, tmp_path: Path) -> None:
    launcher, *options = LAUNCHERS[name]
    if options[-1].endswith("port"):
        options.append(free_port())
    started_by = [] if name == "accelerate_loop" else [interpreter()]
    script = [str(EXAMPLES / f"{name}.py"), "--epochs", "1", "--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parents[1]), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*started_by, str(Path(sys.executable).with_name(launcher)), *options, *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "last loss" in done.stdout
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 33))  # 512 rows in 2 x 8
    assert records[-1]["epoch"] == 1.0
    assert records[-1]["loss"]["mean"] < records[0]["loss"]["mean"]
    assert all(record["integrity"]["relative_error"] < record["integrity"]["rounding_bound"] for record in records)
    assert [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["severity"] != "info"] == []


def test_an_example_as_one_process_trains_on_with_a_sentence(tmp_path: Path) -> None:
    """accelerate wraps nothing then."""
    done = subprocess.run(
        [interpreter(), str(EXAMPLES / "accelerate_loop.py"), "--epochs", "1", "--output-dir", str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parents[1]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "last loss" in done.stdout
    assert done.stderr.count("ds_silent: one process trains this model, so there is nothing to compare") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_little_of_an_example_is_ours(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
    assert 0 < sum("silent" in line for line in lines) <= OURS
