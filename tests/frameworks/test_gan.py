"""Two modules, one trained through the other: what a backward leaves in the other one is cleared, and is no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.practice.probe import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

UPDATES, ROWS = 6, 4
ORDERS = {  # the discriminator's backwards per step
    "dcgan": 2,  # real and fake each by itself; both modules' zero_grad, of the module
    "generator forward first": 1,  # one backward; the optimizers' zero_grad
    "unsynchronised": 1,  # the same, and the backward through the discriminator does not reduce its gradients
    "never cleared": 1,  # a fault: the discriminator steps with what the generator's backward has left in it
}


def modules() -> tuple[Any, Any]:
    torch.manual_seed(0)
    made = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    return made, judge


def adversaries(order: str, netg: Any, netd: Any, optg: Any, optd: Any, generator: torch.Generator) -> None:
    """One update of each."""
    real, noise = torch.randn(ROWS, 2, generator=generator) + 2, torch.randn(ROWS, 3, generator=generator)
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    if order == "dcgan":
        netd.zero_grad()
        cross_entropy(netd(real), yes).backward()  # type: ignore[no-untyped-call]
        fake = netg(noise)
        cross_entropy(netd(fake.detach()), no).backward()  # type: ignore[no-untyped-call]
        optd.step()
        netg.zero_grad()
        cross_entropy(netd(fake), yes).backward()  # type: ignore[no-untyped-call]
        optg.step()
        return
    fake = netg(noise)
    if order != "never cleared":
        optd.zero_grad()
    cross_entropy(netd(torch.cat([real, fake.detach()])), torch.cat([yes, no])).backward()  # type: ignore[no-untyped-call]
    optd.step()
    optg.zero_grad()
    netd.require_backward_grad_sync = order != "unsynchronised"
    judged: Tensor = netd(fake)
    cross_entropy(judged, yes).backward()  # type: ignore[no-untyped-call]
    netd.require_backward_grad_sync = True
    optg.step()


def train(directory: str) -> dict[str, Any]:
    """Every order in one process group: bits with and without, and what was written of each module."""
    return {order: (train_once(order, None), *train_once(order, Path(directory, order))) for order in ORDERS}


def train_once(order: str, folder: Path | None) -> Any:
    netg, netd = modules()
    optg = torch.optim.Adam(netg.parameters(), lr=1e-2)
    optd = torch.optim.Adam(netd.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    observers = []
    if folder is not None:
        for name, net, optimizer in (("g", netg, optg), ("d", netd, optd)):
            block = {"output_dir": str(folder / name), "tensorboard": False, "preflight": False}
            count = ORDERS[order] if name == "d" else 1
            observers.append(ds_silent.attach(net, block, optimizer=optimizer, accumulation=count))
    for _ in range(UPDATES):
        adversaries(order, netg, netd, optg, optd, generator)
    bits = hash_of([*netg.parameters(), *netd.parameters()])
    for observer in reversed(observers):
        assert observer is not None
        observer.close()
    if folder is None:
        return bits
    if dist.get_rank():
        return bits, None
    return bits, {
        name: (list(read_metrics(folder / name / "metrics.jsonl")), list(read_events(folder / name / "events.jsonl")))
        for name in "gd"
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(train, 2, (str(tmp_path_factory.mktemp("gan")),))


@pytest.mark.parametrize("order", ORDERS)
def test_the_bits_are_those_of_the_training_alone(order: str, told: list[dict[str, Any]]) -> None:
    for alone, observed, _ in (rank[order] for rank in told):
        assert alone == observed


@pytest.mark.parametrize("module", ["g", "d"])
@pytest.mark.parametrize("order", [order for order in ORDERS if order != "never cleared"])
def test_each_update_is_a_step_and_healthy(order: str, module: str, told: list[dict[str, Any]]) -> None:
    records, events = told[0][order][2][module]
    assert [record["step"] for record in records] == list(range(1, UPDATES + 1))
    assert [event for event in events if event["severity"] != "info"] == []
    rows = ROWS * (2 if module == "d" else 1)
    assert [record["samples"] for record in records] == [2 * rows * step for step in range(1, UPDATES + 1)]


def test_what_is_never_cleared_is_told(told: list[dict[str, Any]]) -> None:
    _, events = told[0]["never cleared"][2]["d"]
    assert any("were not cleared" in event["message"] for event in events)
