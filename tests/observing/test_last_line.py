"""How a training ends that breaks off: its last printed line, the record of its last step, and what has ended it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from tests.support.ddp_training import DDPCase, build
from tests.support.distributed import run_distributed


def lose_a_rank(directory: str, closes: bool) -> None:
    """Keep what rank 0 prints; ``closes``: as a script's ``finally`` does, which hands on no error."""
    model, optimizer = build(DDPCase())
    generator, printed = torch.Generator().manual_seed(dist.get_rank()), io.StringIO()
    config = {"output_dir": directory, "tensorboard": False}
    with contextlib.redirect_stdout(printed), contextlib.suppress(RuntimeError), contextlib.ExitStack() as stack:
        if closes:
            observer = ds_silent.attach(model, config, optimizer=optimizer)
            assert observer is not None
            stack.callback(observer.close)
        else:
            stack.enter_context(ds_silent.observe(model, optimizer, config=config))
        for step in range(9):
            if step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(directory, "printed").write_text(printed.getvalue())


@pytest.mark.parametrize("closes", [False, True])
def test_the_last_line_says_that_the_training_broke_off(closes: bool, tmp_path: Path) -> None:
    run_distributed(lose_a_rank, 2, (str(tmp_path), closes), may_die=(0, 1))  # rank 0, in the barrier behind it
    line = (tmp_path / "printed").read_text().splitlines()[-1]
    begin, _, end = line.partition("; no events; verdict: ")
    assert begin in {f"[ds_silent] end  {steps} steps measured" for steps in (3, 4)}
    gone = "when rank 1 had gone without a recorded end"
    assert end.startswith(f"The training ended with RuntimeError after step 4, {gone}; until then no fault was seen"), (
        end
    )
    ended = json.loads((tmp_path / "run.json").read_text())["ended"]
    assert (ended["error"], ended["gone"]) == ("RuntimeError", [1])


def closes_in_a_handler(directory: str) -> list[tuple[str | None, bool] | None]:
    """How a training has ended that is begun where an exception is handled, or only closed there."""
    found = []
    cases = [(ImportError, True), (ValueError, False), (StopIteration, False), (KeyboardInterrupt, False)]
    for number, (error, begins) in enumerate(cases):
        output = Path(directory, str(number))
        model, optimizer = build(DDPCase())
        attach = partial(
            ds_silent.attach, model, {"output_dir": str(output), "tensorboard": False}, optimizer=optimizer
        )
        observer = None if begins else attach()
        try:
            raise error
        except error:
            observer = observer or attach()
            assert observer is not None
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH)), False).backward()
            optimizer.step()
            observer.close()
        ended = json.loads((output / "run.json").read_text())["ended"] if dist.get_rank() == 0 else None
        found.append(ended and (ended["error"], ended["interrupted"]))
    return found


def test_an_exception_that_was_there_before_the_training_has_not_ended_it(tmp_path: Path) -> None:
    ends = [(None, False), ("ValueError", False), (None, False), (None, True)]
    assert run_distributed(closes_in_a_handler, 2, (str(tmp_path),))[0] == ends


def last_step_is_lost(directory: str) -> str | None:
    """How a training has ended whose last step nobody could collect, closed where no exception is handled."""
    model, optimizer = build(DDPCase())
    observer: Any = ds_silent.attach(model, {"output_dir": directory, "tensorboard": False}, optimizer=optimizer)
    model(torch.randint(0, VOCABULARY, (ROWS, LENGTH)), False).backward()
    optimizer.step()
    exchange = observer._steps._exchange
    under_way = list(exchange.under_way())

    def lost() -> Iterator[Any]:
        yield from under_way
        raise ConnectionError("Connection closed by peer")

    exchange.under_way = lost
    observer.close()
    return json.loads(Path(directory, "run.json").read_text())["ended"]["error"] if dist.get_rank() == 0 else None


def test_a_collective_that_breaks_at_the_end_is_what_has_ended_the_training(tmp_path: Path) -> None:
    assert run_distributed(last_step_is_lost, 2, (str(tmp_path),))[0] == "ConnectionError"


class Breaks(torch.optim.SGD):
    """Like a parameter that cannot be written: the second step finds it out."""

    steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("no more memory")
        super().step(closure)


def breaks(directory: str) -> str:
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = Breaks(model.parameters(), lr=0.1)
    config = {"output_dir": directory, "trace": {}, "tensorboard": False}
    try:
        with ds_silent.observe(model, optimizer, config=config):
            while True:
                optimizer.zero_grad()
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_the_step_under_way_is_recorded(tmp_path: Path) -> None:
    assert run_distributed(breaks, 2, (str(tmp_path),), timeout=100) == ["no more memory"] * 2
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
