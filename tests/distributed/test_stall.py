"""Ranks that have parted wait for each other: one that waits for the observer's own collective says so."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.distributed import stall
from ds_silent.distributed.agreement import TIMEOUT_VARIABLE
from tests.support.distributed import run_distributed

WAITED, TIMEOUT = 1.0, 8.0  # seconds: until it is said; until torch gives up
PARTED = 4  # the step from which on rank 1 calls its model without the wrapper


def parted(directory: str, healthy: bool) -> tuple[str, list[str], int]:
    """The error that ended the training, what the observer has said, and threads that it has left."""
    os.environ[TIMEOUT_VARIABLE] = str(WAITED)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_silent").addHandler(handler)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = ds_silent.attach(model, {"output_dir": directory, "tensorboard": False}, optimizer=optimizer)
    assert observer is not None
    ended = ""
    try:
        for step in range(1, PARTED + 4):
            if healthy and step == PARTED:
                time.sleep(2 * WAITED)  # all ranks alike: nobody waits for another
            called = model.module if dist.get_rank() == 1 and step >= PARTED and not healthy else model
            called(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        ended = str(error)
    observer.close()
    time.sleep(0.5)
    left = sum(thread.name == "ds_silent stall" for thread in threading.enumerate())
    return ended, [one for one in said if "waits at step" in one], left


def test_a_rank_that_waits_for_the_others_says_so_once(tmp_path: Path) -> None:
    (ended, nothing, left_first), (_, said, left) = run_distributed(parted, 2, (str(tmp_path), False))
    assert ended, "rank 0 waits in the training's own reduction"
    assert nothing == []
    [sentence] = said
    assert f"rank 1 waits at step {PARTED + 1} for what other ranks have measured, since 1 s" in sentence
    assert "called the model without its wrapper" in sentence
    assert (left_first, left) == (0, 0)


def test_a_pause_of_all_ranks_is_no_wait(tmp_path: Path) -> None:
    assert run_distributed(parted, 2, (str(tmp_path), True)) == [("", [], 0)] * 2


def test_a_few_ranks_say_it_for_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(stall, "store_of_all", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda group: group)
    for rank in range(10):
        stall.StallNotice(rank, lambda: 7)._tell(300.0)  # type: ignore[arg-type]
    assert [f"rank {rank} waits at step 7" in caplog.text for rank in range(10)] == [True] * 4 + [False] * 6
