"""A peer that stops answering without closing its connection: how long the rank that is left waits for it.

Under DeepSpeed an exact measurement's collective comes before the reduction of the gradients, a sketch's behind it.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

import ds_silent
from ds_silent.distributed.communicator import timeout_of
from ds_silent.sinks.jsonl import read_metrics
from finetune.lost import lost_peers
from finetune.ranks import join
from tests.support.distributed import run_distributed
from tests.support.training import Case, build, one_step

TIMEOUT = 4.0  # seconds
STEPS = 3  # before the peer falls silent


def left_alone(directory: str, method: str | None) -> tuple[float, str, int]:
    """Rank 0's seconds from its first wait for a stopped rank 1 to the end of its observer, the error, the records."""
    peer = torch.tensor([os.getpid()], dtype=torch.int32)
    dist.broadcast(peer, 1)
    torch.manual_seed(1234)
    groups._WORLD_GROUP = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))  # in which DeepSpeed reduces
    engine = build(Case(method=method or "sketch"), Path(directory), enabled=method is not None)
    observer, said, began = ds_silent.observer_of(engine), "", 0.0
    generator = torch.Generator().manual_seed(dist.get_rank())
    try:
        for step in range(2 * STEPS):
            if step == STEPS and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            began = time.monotonic()
            one_step(engine, generator)
    except RuntimeError as error:
        said = str(error)
    if observer is not None:
        observer.close()
    seconds = time.monotonic() - began
    if dist.get_rank() == 0:
        os.kill(int(peer), signal.SIGCONT)
    dist.barrier()
    records = list(read_metrics(Path(directory, "metrics.jsonl"))) if observer is not None else []
    return seconds, said, len(records)


@pytest.mark.parametrize("method", [None, "exact", "sketch"], ids=["not observed", "exact", "sketch"])
@pytest.mark.long
def test_a_silent_peer_is_waited_for_once(method: str | None, tmp_path: Path) -> None:
    seconds, said, records = run_distributed(left_alone, 2, (str(tmp_path), method))[0]
    assert str(lost_peers(RuntimeError(said))).startswith("nothing has come from another rank")
    assert TIMEOUT - 0.5 < seconds < TIMEOUT + 3.0  # and not twice
    assert records in ((0,) if method is None else (STEPS - 1, STEPS))  # the last one was under way


def timeouts_of_an_engine(file: str) -> tuple[float, float]:
    """Seconds of the group that was given a time-out, and of the one in which DeepSpeed reduces gradients."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=77), init_method=f"file://{file}", rank=0, world_size=1)
    join()
    model = torch.nn.Linear(2, 2)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = [timeout_of(group) for group in (dist.distributed_c10d._get_default_group(), engine.data_parallel_group)]
    assert all(found)
    return tuple(one.total_seconds() for one in found if one is not None)  # type: ignore[return-value]


def test_the_finetune_waits_for_gradients_as_long_as_for_anything(tmp_path: Path) -> None:
    assert run_distributed(timeouts_of_an_engine, 1, (str(tmp_path / "rendezvous"),), timeout=60) == [(77.0, 77.0)]
