"""A child of a rank (a DataLoader's worker, a helper) neither writes, closes, nor communicates: its parent does."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ds_silent
from tests.support.distributed import run_distributed
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, engine_of, one_step

STEPS = 6


class Rows(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def fork_and_leave(observer: Any, how: str) -> int:
    """Exit status of a child that ends as a helper does, with all that Python does at its end."""
    child = os.fork()
    if child == 0:
        if how == "atexit":
            status = 0
            try:
                atexit._run_exitfuncs()  # what a child that returns from its script runs
                sys.stdout.flush()
            except BaseException:
                status = 1
            os._exit(status)
        if how == "uses":
            observer.flush()
            observer.state_dict()
            observer.close()
            os._exit(1 if observer.measures(0) or ds_silent.observer_of(observer._capture.framework._engine) else 0)
        sys.exit(0)  # through every frame of the rank, as in a user's script; its end is caught in `forked`
    return os.waitpid(child, 0)[1]


def forked(directory: str, how: str, limit: int) -> dict[str, Any]:
    config = Case(stage=1).config(Path(directory, "on"), enabled=True)
    config["silent_consistency"]["tensorboard"] = True
    engine = engine_of(config, gather_limit=limit)
    observer = ds_silent.observer_of(engine)
    generator, statuses, me = torch.Generator().manual_seed(dist.get_rank()), [], os.getpid()
    if how == "worker":
        for tokens in DataLoader(Rows(), batch_size=ROWS, num_workers=2, multiprocessing_context="fork"):
            engine.backward(engine(tokens, False))
            engine.step()
    else:
        for _ in range(STEPS):
            one_step(engine, generator)
            try:
                statuses.append(fork_and_leave(observer, how))
            except SystemExit:
                atexit._run_exitfuncs()
                os._exit(0)
    assert os.getpid() == me
    observing = observer.measures(0)
    observer.close()
    return {"statuses": statuses, "observing": observing, "steps": int(engine.global_steps)}


@pytest.mark.parametrize(
    ("how", "limit"), [("worker", 64), ("sys.exit", 64), ("atexit", 64), ("atexit", 1), ("uses", 64)]
)
@pytest.mark.long
def test_each_step_is_written_once_by_the_parent(how: str, limit: int, tmp_path: Path) -> None:
    results = run_distributed(forked, 2, (str(tmp_path), how, limit), timeout=100)
    for result in results:
        assert result == {"statuses": [0] * (0 if how == "worker" else STEPS), "observing": True, "steps": STEPS}
    lines = Path(tmp_path, "on", "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS  # raw lines: a reader would drop what is there twice
    events = Path(tmp_path, "on", "events.jsonl").read_text().splitlines()
    assert len(events) == len(set(events))
    assert not any("observer-off" in line for line in events)
