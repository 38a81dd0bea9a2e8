"""Recomputed activations with other random numbers, and averages of the weights that are updated too often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ds_silent
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import each, run_distributed

STEPS, PARTS = 6, 4
PLAIN, ONCE = dict[str, bool](), "once"
OTHERS = {"preserve_rng_state": False}


class Blocks(nn.Module):
    """Two blocks under a checkpoint; ``inner`` is what stands between their layers."""

    def __init__(self, inner: Callable[[], nn.Module], **how: bool):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), inner(), nn.Linear(8, 8)) for _ in range(2))
        self._run = partial(checkpoint, **how)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._run(block, x)
        return x


def train(directory: str, inner: Callable[[], nn.Module], how: dict[str, bool], reentrant: bool, average: str) -> Any:
    """Return what was told, and the last gradient's distance from that of the same numbers without a checkpoint."""
    torch.manual_seed(0)
    module = Blocks(inner, use_reentrant=reentrant, **how)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torch.manual_seed(1 + dist.get_rank())
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}) as observer:
        for _ in range(STEPS):
            for part in range(PARTS):
                last = part == PARTS - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    (model(torch.randn(4, 8).requires_grad_()).square().mean() / PARTS).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                if last or average != ONCE:
                    ema.update_parameters(module)
        observer.flush()
        dist.barrier()
        events = read_events(Path(directory) / "events.jsonl")
    return [(event["step"], event["kind"], event["severity"], event["where"], event["message"]) for event in events]


DROPOUT, NONE = partial(nn.Dropout, 0.3), nn.Tanh
DRAWS = [(1, "update-mismatch", "warning", "activation checkpointing")]
OFTEN = [(3, "update-mismatch", "info", "AveragedModel")]
CASES: dict[str, tuple[tuple[Any, ...], list[tuple[int, str, str, str]]]] = {
    f"{name}, {'reentrant' if reentrant else 'not reentrant'}": ((inner, how, reentrant, ONCE), told)
    for reentrant in (False, True)
    for name, inner, how, told in (
        ("dropout with its state", DROPOUT, PLAIN, []),
        ("nothing random", NONE, OTHERS, []),
        ("dropout without its state", DROPOUT, OTHERS, DRAWS),
    )
}
CASES |= {
    "dropout of 0": ((partial(nn.Dropout, 0.0), OTHERS, False, ONCE), []),
    "an average per micro-batch": ((NONE, PLAIN, False, "often"), OFTEN),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recomputed")
    cases = {name: (str(folder / name), *case) for name, (case, _) in CASES.items()}
    return dict(run_distributed(each, 2, (train, cases))[0])


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_of_a_loop(name: str, told: dict[str, Any]) -> None:
    assert [event[:4] for event in told[name]] == CASES[name][1]


def test_the_average_is_said_to_forget_faster(told: dict[str, Any]) -> None:
    [event] = told["an average per micro-batch"]
    assert event[4].startswith("AveragedModel averages the weights 4 times in each step, since step 1: between two")


def gradient(preserves: bool) -> Tensor:
    """Of a dropout's input under a checkpoint: the mask of the loss, or another one."""
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    kept = checkpoint(lambda x: nn.functional.dropout(x, 0.5) * x, x, use_reentrant=False, preserve_rng_state=preserves)
    (kept.sum()).backward()
    assert isinstance(x.grad, Tensor)
    return x.grad - 2.0 * kept.detach()  # the derivative of m x^2 at 1, of which the value is m


def test_the_gradient_is_another_functions_indeed() -> None:
    assert float(gradient(True).abs().max()) == 0.0
    assert float(gradient(False).abs().max()) > 0.0


def test_an_error_inside_reaches_the_script(tmp_path: Path) -> None:
    run_distributed(raises_inside, 1, (str(tmp_path),))


def raises_inside(directory: str) -> None:
    def breaks(x: Tensor) -> Tensor:
        raise ArithmeticError("the script's own")

    module = nn.Linear(2, 2)
    model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), 0.1)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for reentrant in (False, True):
            with pytest.raises(ArithmeticError, match="own"):
                checkpoint(breaks, torch.ones(2), use_reentrant=reentrant, preserve_rng_state=False)
