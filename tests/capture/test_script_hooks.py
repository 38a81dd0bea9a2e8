"""A script's own hooks on gradients: where one changes the gradient of some ranks alone, that is told as what it is."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.patches import Patches
from ds_silent.patches.script_hooks import ScriptHooks
from ds_silent.preflight.items import HOOKS
from ds_silent.runs import read_run, verdict_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

RANKS, STEPS, AT = 3, 6, 4


def twice(gradient: Tensor) -> Tensor:
    return 2.0 * gradient


class Now:
    """Halve a gradient in place, from a step on."""

    step = 0

    def __init__(self, at: int):
        self.at = at

    def __call__(self, gradient: Tensor) -> None:
        if self.step >= self.at:
            gradient.mul_(0.5)


def looks(gradient: Tensor) -> None:
    """What a tracker does on one rank."""


def by_rank(gradient: Tensor) -> Tensor:
    """What a script that weighs its ranks does, wrongly."""
    return gradient * (3.0 if dist.get_rank() == 1 else 1.0)


def half_on_one(gradient: Tensor) -> Tensor:
    return 0.5 * gradient if dist.get_rank() == 1 else gradient


def clips(gradient: Tensor) -> Tensor:
    """Another factor on each rank and at each step."""
    return gradient / gradient.norm()


def masks(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 2)


def hooks_of(case: str, rank: int) -> Any:
    hooks = {
        "one doubles": twice if rank == 1 else None,
        "one writes, later": Now(AT) if rank == 2 else None,
        "one looks": looks if rank == 0 else None,
        "one looks, all double": (looks, twice) if rank == 0 else twice,
        "one looks, all write, one after the other": (Now(1 + rank), looks) if rank == 0 else Now(1 + rank),
        "one gives it back": (lambda gradient: gradient) if rank == 0 else None,
        "all double": twice,
        "all write, one after the other": Now(1 + rank),
        "by rank": by_rank,
        "half on one": half_on_one,
        "all clip": clips,
        "all mask": masks,
        "none": None,
    }[case]
    return hooks if isinstance(hooks, tuple) else () if hooks is None else (hooks,)


def train(framework: str, case: str, directory: Path, place: str = "ahead") -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def register() -> None:
        for hook in hooks_of(case, dist.get_rank()):
            if place in ("accumulated", "fsdp2"):
                module[2].weight.register_post_accumulate_grad_hook(partial(on_accumulated, hook))
            else:
                module[2].weight.register_hook(hook)

    if place == "ahead":
        register()
    block = {"output_dir": str(directory), "tensorboard": False}
    if place == "fsdp2":
        fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    Now.step = 0
    if framework == "ddp":
        wrapped: Any = module if place == "fsdp2" else DistributedDataParallel(module)
        observer = ds_silent.attach(wrapped, block, optimizer=optimizer)
    else:
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": int(framework[-1])}}
        config |= {"silent_consistency": block, "zero_allow_untested_optimizer": True}
        wrapped, *_ = ds_silent.initialize(model=module, optimizer=optimizer, config=config)
        observer = ds_silent.observer_of(wrapped)
    assert observer is not None
    if place != "ahead":
        register()
    for _ in range(STEPS):
        Now.step += 1
        loss = wrapped(torch.randn(4, 6, generator=generator)).square().mean()
        if framework == "ddp":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            wrapped.backward(loss)
            wrapped.step()
    observer.close()


def on_accumulated(hook: Any, parameter: Tensor) -> None:
    parameter.grad = hook(parameter.grad)


CASES = ("one doubles", "one writes, later", "one looks", "one gives it back", "all double", "none")
CASES = (*CASES, "all write, one after the other", "one looks, all double")
CASES = (*CASES, "one looks, all write, one after the other", "all clip", "all mask", "by rank", "half on one")
BEHIND = ("all double", "all clip", "all mask", "by rank", "half on one", "one doubles")
PLACES = ("behind", "accumulated")
BEHIND_AT = (*product(PLACES, BEHIND), ("fsdp2", "all double"))  # there of a shard, behind the reduction
FRAMEWORKS = ("ddp", "zero 1")


def trainings(directory: Path) -> None:
    for framework in FRAMEWORKS:
        for case in CASES:
            train(framework, case, directory / framework / case)
        for place, case in BEHIND_AT if framework == "ddp" else ():
            train(framework, case, directory / place / case, place)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hooks")
    run_distributed(trainings, RANKS, (made,), timeout=200)
    return made


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES)
def test_a_hook_that_changes_the_gradient_of_one_rank_is_told(framework: str, case: str, directory: Path) -> None:
    events = [one for one in read_events(directory / framework / case / "events.jsonl") if one["severity"] != "info"]
    assert len(list(read_metrics(directory / framework / case / "metrics.jsonl"))) == STEPS
    if case in ("by rank", "half on one"):
        [event] = events
        assert (event["kind"], event["severity"], event["ranks"]) == ("outlier-rank", "error", [1])
        assert (event["step"], event["where"]) == (4, HOOKS)
        times, name = ("3", "by_rank") if case == "by rank" else ("0.5", "half_on_one")
        assert f"({name} (test_script_hooks.py, line" in event["message"] or times == "0.5"  # rank 0 has not changed it
        assert f"by 1 on ranks 0, 2; by {times} on rank 1" in event["message"]
        return
    if not case.startswith(("one doubles", "one writes")):
        assert events == []
        return
    rank, step = (1, 1) if case == "one doubles" else (2, AT)
    name = f"twice (test_script_hooks.py, line {twice.__code__.co_firstlineno})" if case == "one doubles" else "Now"
    [event] = events
    assert (event["kind"], event["severity"], event["ranks"]) == ("outlier-rank", "error", [rank])
    assert (event["step"], event["where"]) == (step, "hooks on gradients")
    others = ", ".join(str(one) for one in range(RANKS) if one != rank)
    said = f"hooks on gradients differ between ranks: none on ranks {others}; 2.weight: {name} on rank {rank}."
    assert event["message"] == said
    verdict = verdict_of(read_run(directory / framework / case)).sentence
    assert verdict.startswith(f"A hook changes gradients on some ranks alone (rank {rank}")


@pytest.mark.parametrize(("place", "case"), BEHIND_AT)
def test_a_hook_behind_the_observers_is_no_wrong_reduction_where_all_ranks_have_it(
    place: str, case: str, directory: Path
) -> None:
    events = list(read_events(directory / place / case / "events.jsonl"))
    kinds = [(one["severity"], one["kind"], one["step"], one["ranks"]) for one in events]
    wrong = ("error", "aggregation-error", 1, [1])
    if case in ("half on one", "one doubles"):
        told = [("error", "outlier-rank", 1, [1])] if case == "one doubles" else [wrong]
        assert [kind for kind in kinds if kind[0] != "info"] == told
        if case == "one doubles":  # it has another hook than the others, and the wrong sum follows from that
            follows = [one["follows"] for one in events if one["kind"] == "aggregation-error"]
            assert follows[0] == f"outlier-rank ({HOOKS})"
        return
    assert kinds[0] == ("info", "gradient-changed", 1, [])
    told = [("error", "outlier-rank", 4, [1])] if case == "by rank" else []
    assert [kind for kind in kinds if kind[0] != "info"] == told


def two(directory: Path) -> None:
    train("ddp", "one doubles", directory)


def test_of_two_ranks_both_are_named(tmp_path: Path) -> None:
    run_distributed(two, 2, (tmp_path,))
    [event] = [one for one in read_events(tmp_path / "events.jsonl") if one["severity"] != "info"]
    assert (event["kind"], event["step"], event["ranks"], event["where"]) == ("outlier-rank", 1, [0, 1], HOOKS)
    assert event["message"].endswith("on rank 1.")


def test_hooks_keep_their_order_and_are_as_before_when_the_observers_is_taken_off() -> None:
    seen: list[tuple[str, float]] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: (seen.append(("first", float(gradient[0]))), 3.0 * gradient)[1])
    second = parameter.register_hook(lambda gradient: seen.append(("second", float(gradient[0]))))
    patches, hooks = Patches(), ScriptHooks()
    hooks.register(patches, "weight", parameter, lambda gradient: seen.append(("own", float(gradient[0]))))
    assert len(hooks.names) == 2
    parameter.register_hook(lambda gradient: seen.append(("behind", float(gradient[0]))))
    for _ in range(2):
        parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [("first", 1.0), ("second", 3.0), ("own", 3.0), ("behind", 3.0)] * 2
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [6.0, 6.0]
    [(changing, at)] = hooks.changed.items()
    assert changing.startswith("<lambda> (test_script_hooks.py, line ")
    assert at == "weight"
    patches.undo()
    second.remove()
    seen.clear()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert [name for name, _ in seen] == ["first", "behind"]


def test_a_builtin_is_a_hook_of_the_scripts_own() -> None:
    parameter, hooks, patches = nn.Parameter(torch.ones(4)), ScriptHooks(), Patches()
    parameter.register_hook(torch.zeros_like)
    hooks.register(patches, "weight", parameter, lambda gradient: None)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert hooks.changed == {"torch.zeros_like": "weight"}
    patches.undo()
