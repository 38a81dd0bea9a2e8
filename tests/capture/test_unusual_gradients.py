"""Gradients that are not what a script usually has: sparse, cleared before the step, or reduced by the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, Probe, _hash_weights


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8, sparse=True)
        self.out = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens)).square().mean()


def refused(directory: str) -> list[str | None]:
    said: list[str | None] = []
    for trainable in (True, False):
        model = Sparse()
        model.table.requires_grad_(trainable)
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            config = Case().config(Path(directory), enabled=True)
            ds_silent.initialize(model=model, model_parameters=parameters, config=config)
            said.append(None)
        except ds_silent.ConfigError as error:
            said.append(str(error))
    return said


def test_a_sparse_embedding_is_refused_by_its_name_unless_it_is_frozen(tmp_path: Path) -> None:
    for trainable, frozen in run_on_kept_ranks(refused, 2, (str(tmp_path),)):
        assert trainable is not None
        assert trainable.startswith("silent_consistency cannot observe table (Embedding with sparse=True)")
        assert "\n" not in trainable
        assert frozen is None


def train(directory: Path, stage: int, what: str, enabled: bool) -> str:
    """Three steps; at the second, ``what`` has become of gradients between the backward and the step."""
    torch.manual_seed(1234)
    model = Probe(None)
    model.norm.bias.requires_grad_(what != "left out")
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.norm.bias.requires_grad_()
    config = Case(stage=stage).config(directory, enabled)
    engine = ds_silent.initialize(model=model, model_parameters=parameters, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 4):
        loss = engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False)
        engine.backward(loss)
        if step == 2 and what == "one rank" and dist.get_rank() == 1:
            model.norm.weight.grad = None
        if step == 2 and what == "everything":
            engine.optimizer.zero_grad()
        engine.step()
    weights = _hash_weights(engine)
    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    dist.barrier()
    engine.destroy()
    return weights


def whats(stage: int) -> tuple[str, ...]:
    """``left out``: a trainable parameter that no optimizer has got."""
    return ("one rank", "everything", "left out") if stage else ("one rank", "everything")


def both(directory: str, stage: int) -> list[Any]:
    return [[train(Path(directory) / what, stage, what, enabled) for enabled in (False, True)] for what in whats(stage)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.long
def test_cleared_gradients_are_observed_as_what_they_are(stage: int, tmp_path: Path) -> None:
    for result in run_on_kept_ranks(both, 2, (str(tmp_path), stage), timeout=300):
        for what, (plain, observed) in zip(whats(stage), result, strict=True):
            assert plain == observed, what
    for what in whats(stage):
        events = list(read_events(tmp_path / what / "events.jsonl"))
        assert "observer-off" not in {event["kind"] for event in events}, (what, events)
        assert [record["step"] for record in read_metrics(tmp_path / what / "metrics.jsonl")] == [1, 2, 3]
        told = [event for event in events if event["kind"] == "aggregation-error" and event["severity"] != "info"]
        # only stage 0 holds the aggregate in parameter.grad: elsewhere the optimizer never looks there. What all ranks
        # do to their gradients is the script's own business; what one of them does takes the replicas apart.
        assert [event["step"] for event in told] == ([2] if stage == 0 and what == "one rank" else []), (what, events)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x * self.phase).abs()).square().mean()


def complex_parameters(directory: str) -> str:
    model = nn.parallel.DistributedDataParallel(Complex())
    block = {"output_dir": directory, "tensorboard": False}
    with pytest.raises(ds_silent.ConfigError) as caught:
        ds_silent.attach(model, {"silent_consistency": block}, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return str(caught.value)


def test_complex_parameters_are_refused_in_a_sentence(tmp_path: Path) -> None:
    said = run_on_kept_ranks(complex_parameters, 2, (str(tmp_path),), timeout=60)
    assert said == 2 * [
        "silent_consistency cannot observe phase, whose numbers are complex (complex64); keep it as "
        'torch.view_as_real, freeze it, or set "silent_consistency": {"enabled": false}'
    ]


def reduced_by_hand(directory: str) -> list[dict[str, Any]]:
    """DDP reduces nothing, and the script all of it in one piece, as many research scripts do."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    block = {"output_dir": directory, "tensorboard": False, "detectors": {"dealt": "random"}}
    with ds_silent.observe(model, optimizer, config=block):
        for _ in range(14):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(8, 16)).square().mean().backward()
            together = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
            dist.all_reduce(together.div_(dist.get_world_size()))
            for parameter, part in zip(
                module.parameters(), together.split([p.numel() for p in module.parameters()]), strict=True
            ):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
    return list(read_events(Path(directory) / "events.jsonl"))


def test_what_was_not_read_before_the_script_reduced_it_is_not_zero(tmp_path: Path) -> None:
    """Once a parameter was said to have a gradient of exactly zero on one rank, as its share of the aggregate is."""
    events = run_on_kept_ranks(reduced_by_hand, 2, (str(tmp_path),))[0]
    assert [event for event in events if event["severity"] != "info" or event["kind"] == "zero-gradient"] == []


def each_rows_gradients(directory: str) -> tuple[int, list[str]]:
    """Rows' own gradients by torch.func beside DDP's, as private training clips them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())

    def loss_of(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(module, parameters, (row[None],))
        return out.square().mean()

    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for _ in range(4):
            rows = torch.randn(5, 8)
            own = {name: parameter.detach() for name, parameter in module.named_parameters()}
            torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(own, rows)
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    samples = [record["samples"] for record in read_metrics(Path(directory) / "metrics.jsonl")]
    return samples[-1], [event["kind"] for event in read_events(Path(directory) / "events.jsonl")]


def test_forwards_inside_a_transform_are_the_scripts_own(tmp_path: Path) -> None:
    samples, kinds = run_on_kept_ranks(each_rows_gradients, 2, (str(tmp_path),))[0]
    assert (samples, [kind for kind in kinds if kind != "same-draws"]) == (40, [])
