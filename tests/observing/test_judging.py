"""A step is judged while a backward runs, in which the training's thread needs no Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.sinks import worker
from tests.support import ddp_training, training
from tests.support.distributed import each, run_distributed, wait_for

STEPS = 6


def train(framework: str, directory: Path, interval: int) -> None:
    worker.LATEST = 600.0
    block: dict[str, Any] = {"output_dir": str(directory), "tensorboard": False, "interval": interval}
    engine: Any = None
    if framework == "deepspeed":
        config = training.Case().config(directory, False) | {"silent_consistency": block}
        model = engine = training.engine_of(config)
        observer = ds_silent.observer_of(engine)
    else:
        sharded = framework == "fsdp2"
        make: Any = ddp_training.build_fsdp2 if sharded else ddp_training.build
        model, optimizer = make(ddp_training.FSDP2Case() if sharded else ddp_training.DDPCase())
        observer = ds_silent.attach(model, block, optimizer=optimizer)
    assert observer is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    task, waited = observer._publisher.recorder._beside.task, 0
    assert (task is not None) == (dist.get_rank() == 0)
    for _ in range(STEPS):
        loss = model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False)
        waited += task is not None and not task.is_done
        loss.backward() if engine is None else engine.backward(loss)
        if task is not None:
            wait_for(lambda: task.is_done)
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step()
    assert waited == (0 if task is None else (STEPS - 2) // interval)  # it is published behind the next one
    observer.close()


def test_a_step_waits_for_the_next_backward(tmp_path: Path) -> None:
    cases = [(framework, interval) for framework in ("ddp", "fsdp2", "deepspeed") for interval in (1, 2)]
    folders = {(framework, interval): tmp_path / f"{framework} {interval}" for framework, interval in cases}
    run_distributed(each, 2, (train, {case: (case[0], folder, case[1]) for case, folder in folders.items()}))
    for (_, interval), folder in folders.items():
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS // interval, folder
