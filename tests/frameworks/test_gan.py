"""Two modules, one trained through the other, or with a part in common: what is the other's is no step of this one."""

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
from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks

UPDATES, ROWS = 6, 4
ORDERS = {  # the discriminator's backwards per step
    "dcgan": 2,  # real and fake each by itself; both modules' zero_grad, of the module
    "generator forward first": 1,  # one backward; the optimizers' zero_grad
    "unsynchronised": 1,  # the same, and the backward through the discriminator does not reduce its gradients
    "never cleared": 1,  # a fault: the discriminator steps with what the generator's backward has left in it
    "in turn": 1,  # no adversaries: two heads over one body, each trained by itself
    "in stages": 1,  # the same, one after the other, as a probe follows a pre-training
}
SHARED = ("in turn", "in stages")


def modules(order: str = "dcgan") -> tuple[Any, Any]:
    torch.manual_seed(0)
    if order in SHARED:
        body = nn.Sequential(nn.Linear(2, 8), nn.ReLU())
        heads = nn.Linear(8, 1), nn.Linear(8, 1)
        made, judge = (DistributedDataParallel(nn.Sequential(body, head)) for head in heads)
        return made, judge
    made = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    return made, judge


def adversaries(order: str, netg: Any, netd: Any, optg: Any, optd: Any, generator: torch.Generator) -> None:
    """One update of each."""
    real, noise = torch.randn(ROWS, 2, generator=generator) + 2, torch.randn(ROWS, 3, generator=generator)
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    if order in SHARED:
        for net, optimizer, rows in ((netg, optg, real), (netd, optd, torch.cat([real, real - 4]))):
            if net is not None:
                optimizer.zero_grad()
                net(rows).square().mean().backward()
                optimizer.step()
        return
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
    netg, netd = modules(order)
    optg = torch.optim.Adam(netg.parameters(), lr=1e-2)
    optd = torch.optim.Adam(netd.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    observers = []
    if folder is not None:
        for name, net, optimizer in (("g", netg, optg), ("d", netd, optd)):
            block = {"output_dir": str(folder / name), "tensorboard": False, "preflight": False}
            count = ORDERS[order] if name == "d" else 1
            observers.append(ds_silent.attach(net, block, optimizer=optimizer, accumulation=count))
    for update in range(UPDATES * (2 if order == "in stages" else 1)):
        nets = (netg, netd) if order != "in stages" else (netg, None) if update < UPDATES else (None, netd)
        adversaries(order, *nets, optg, optd, generator)
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
    return run_on_kept_ranks(train, 2, (str(tmp_path_factory.mktemp("gan")),))


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


# -- two DeepSpeed engines, as in DeepSpeedExamples' GAN -------------------------------------------------------------


def engines_once(stage: int, clears: str, folder: Path | None) -> Any:
    """The discriminator's zero_grad clears what the generator's backward has left there; two backwards are a step."""
    netg, netd = (model.module for model in modules())
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (netg, netd)]
    made = []
    for name, net, optimizer in zip("gd", (netg, netd), optimizers, strict=True):
        block = {"enabled": folder is not None, "output_dir": f"{folder}/{name}", "tensorboard": False}
        config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage}}
        config |= {"silent_consistency": {**block, "preflight": False}}
        made.append(ds_silent.initialize(model=net, optimizer=optimizer, config=config)[0])
    engine_g, engine_d = made
    generator = torch.Generator().manual_seed(dist.get_rank())
    yes, no, norms = torch.ones(ROWS, 1), torch.zeros(ROWS, 1), []
    for _ in range(UPDATES):
        clear = {"module": netd, "engine": engine_d, "optimizer": optimizers[1]}[clears].zero_grad
        clear()
        real, noise = torch.randn(ROWS, 2, generator=generator) + 2, torch.randn(ROWS, 3, generator=generator)
        engine_d.backward(cross_entropy(netd(real), yes))
        fake = netg(noise)
        engine_d.backward(cross_entropy(netd(fake.detach()), no))
        norms.append(sum(float(p.grad.double().square().sum()) for p in netd.parameters() if p.grad is not None) ** 0.5)
        engine_d.step()
        netg.zero_grad()
        engine_g.backward(cross_entropy(netd(fake), yes))
        engine_g.step()
    bits = hash_of([*netg.parameters(), *netd.parameters()])
    for engine in reversed(made):
        engine.destroy()
    if folder is None or dist.get_rank():
        return bits, norms
    written = {
        name: (list(read_metrics(folder / name / "metrics.jsonl")), list(read_events(folder / name / "events.jsonl")))
        for name in "gd"
    }
    return bits, norms, written


CLEARS = ("module", "engine", "optimizer")


def engines(directory: str) -> Any:
    return {how: (engines_once(0, how, None), engines_once(0, how, Path(directory, how))) for how in CLEARS}


def test_what_a_generators_engine_leaves_in_the_discriminators_is_cleared_and_is_no_gradient(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(engines, 2, (str(tmp_path),))
    for how in CLEARS:
        assert all(rank[how][0][0] == rank[how][1][0] for rank in ranks)
        norms, written = ranks[0][how][1][1:]
        for name in "gd":
            records, events = written[name]
            learnt = 1 if name == "d" else 0  # two backwards a step, which the configuration does not say
            assert [record["step"] for record in records] == list(range(1 + learnt, UPDATES + 1))
            assert [event for event in events if event["severity"] != "info"] == []
        aggregated = [record["grad_norm"]["aggregated"] for record in written["d"][0]]
        assert aggregated == pytest.approx(norms[1:], rel=1e-5)
