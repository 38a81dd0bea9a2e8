"""What rules find reaches the events: from all ranks, from some, at the end, and from none that broke."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture import step
from ds_silent.drill.training import hash_of
from ds_silent.rules.rule import Breach, Rule
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_on_kept_ranks

STEPS = 9


class FromTo(Rule):
    """Find its breach on some ranks, from one step to another."""

    def __init__(self, framework: Any, key: str, ranks: tuple[int, ...], first: int, last: int):
        self.framework, self.key, self.ranks, self.first, self.last = framework, key, ranks, first, last

    def breaches(self) -> tuple[Breach, ...]:
        if dist.get_rank() not in self.ranks or not self.first <= self.framework.step <= self.last:
            return ()
        message, remedy = f"{self.key} is “wrong”. {'x' * 3000}", "Mend it."
        return (Breach(self.key, "update-mismatch", "error", "group 0", message, remedy, self.first),)


class Breaks(Rule):
    """Raise on one rank; its hooks too."""

    def __init__(self) -> None:
        self.calls = 0

    def connect(self, patches: Any, safely: Callable[..., Any]) -> None:
        patches.add(torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: safely(self.look)))

    def look(self) -> None:
        self.calls += 1
        if dist.get_rank() == 1 and self.calls > 4:
            raise ValueError("no such thing")

    def breaches(self) -> tuple[Breach, ...]:
        return ()


def train(directory: Path, rules: Callable[[Any], list[Rule]] | None, **block: Any) -> str:
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rules is not None:
        step.rules_of = lambda framework, config: rules(framework)  # type: ignore[assignment]
    if rules is not None or block:
        config = {"output_dir": str(directory), "tensorboard": False, **block}
        ds_silent.attach(model, optimizer=optimizer, config=config)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = hash_of([model.module])
    if rules is not None or block:
        observer = ds_silent.observer_of(model)
        assert observer is not None
        observer.close()
    return str(weights)


def of_rules(directory: Path) -> list[tuple[Any, ...]]:
    return [
        (event["step"], event["phase"], event["ranks"], event["message"][:30])
        for event in read_events(directory / "events.jsonl")
        if event["kind"] == "update-mismatch"
    ]


def several(framework: Any) -> list[Rule]:
    everybody = tuple(range(3))
    return [
        FromTo(framework, "all", everybody, 3, STEPS),
        FromTo(framework, "one", (1,), 4, 6),
        FromTo(framework, "most", (0, 2), 5, 7),  # more than half: the other's part need not show it
        FromTo(framework, "last", everybody, STEPS, STEPS),
        Breaks(),
    ]


def test_breaches_become_events_with_their_ranks_and_their_end(tmp_path: Path) -> None:
    watched = run_on_kept_ranks(train, 3, (tmp_path, several))
    assert of_rules(tmp_path) == [
        (3, "started", [], "all is “wrong”. xxxxxxxxxxxxxx"),
        (4, "started", [1], "On rank 1: one is “wrong”. xxx"),
        (5, "started", [], "On ranks 0 and 2: most is “wro"),
        (7, "ended", [1], "Ended: update-mismatch, from s"),
        (8, "ended", [], "Ended: update-mismatch, from s"),
        (9, "started", [], "last is “wrong”. xxxxxxxxxxxxx"),
    ]
    assert not [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "observer-off"]
    assert watched == run_on_kept_ranks(train, 3, (tmp_path, None)), "a rule that breaks changes no weight"


def test_the_block_switches_rules_off() -> None:
    from ds_silent.config import SilentConsistencyConfig
    from ds_silent.rules import rules_of

    for block in ({"rules": False}, {"detectors": {"enabled": False}}):
        assert rules_of(None, SilentConsistencyConfig(**block)) == []  # type: ignore[arg-type]
