"""Trainable parameters that nothing reduces or trains: a fact at their first step; all that only looks so is silent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

import ds_silent
from ds_silent.capture.untrained import _others
from ds_silent.drill.training import hash_of
from ds_silent.frameworks.ddp import reduced_parameters
from ds_silent.patches import Patches
from ds_silent.rules.no_gradient import NoGradient, _in_reentrant_checkpoint
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_on_kept_ranks

WIDTH, STEPS, LATE = 8, 6, 3


class Net(nn.Module):
    """Three layers, of which the second is frozen, a weight that two layers share, and a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH)  # takes no part
        self.second.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows)) + self.up(self.down(rows))
        return self.last(torch.tanh(self.second(hidden)) + self.tied(hidden)).square().mean()


class DelayedReduction(DistributedDataParallel):
    """Wait for the delayed reduction: torch 2.13 drops its handle, so the optimizer may step before its end."""

    def _delayed_all_reduce_hook(self, grad: Tensor) -> Tensor:
        assert self._delay_grad_buffer is not None
        self._delay_grad_buffer.div_(dist.get_world_size())
        dist.all_reduce(self._delay_grad_buffer)
        return grad


@dataclass
class Script:
    """What a script does before the step LATE."""

    module: Net
    model: Any
    optimizers: list[torch.optim.Optimizer]
    attach: Callable[[], None]
    wrap: Callable[[], None]


def unfreeze(script: Script) -> None:
    """The optimizer holds it already: frozen parameters have no gradient, so torch leaves them out."""
    script.module.second.requires_grad_(True)


def unfreeze_into_a_group(script: Script) -> None:
    script.module.second.requires_grad_(True)
    script.optimizers[0].add_param_group({"params": list(script.module.second.parameters())})


def begin_a_stage(script: Script) -> None:
    """All anew, as staged unfreezing does."""
    script.module.second.requires_grad_(True)
    script.optimizers[:] = [torch.optim.SGD([p for p in script.module.parameters() if p.requires_grad], lr=0.1)]
    script.wrap()
    script.attach()


def wrap_anew(script: Script) -> None:
    """Another wrapper, and the observer stays with the old one."""
    script.module.second.requires_grad_(True)
    script.model = DistributedDataParallel(script.module, find_unused_parameters=True)


def freeze(script: Script) -> None:
    script.module.last.requires_grad_(False)


def replace_last(script: Script) -> None:
    """As who ties or resizes an embedding behind what wraps and trains it."""
    script.module.last.weight = nn.Parameter(script.module.last.weight.detach().clone())


@dataclass(frozen=True)
class Case:
    late: Callable[[Script], None] | None = None
    holds: str = "all"  # which parameters the optimizers hold: all, trainable, two, no last, one of two
    framework: str = "ddp"
    before: bool = False  # it comes between the wrapper and the observer
    clears: str = "module"  # whose zero_grad the script calls
    ignores: tuple[str, ...] = ()  # what the wrapper is told not to reduce
    thawed: bool = False  # nothing is frozen as the wrapper is built
    says: tuple[str, ...] = ()
    expected: tuple[tuple[str, str, int], ...] = ()  # kind, where, step


LAYER = "second.weight, second.bias"
UNREDUCED = (("unreduced-gradient", LAYER, LATE),)
CASES = {
    "frozen layers": Case(),
    "frozen layers, not held": Case(holds="trainable"),
    "a reduction that is delayed": Case(framework="ddp, delayed"),
    "frozen layers, fully_shard": Case(framework="fsdp2"),
    "told to ignore a layer": Case(ignores=("last.weight",), expected=(("replica-drift", "last.weight", 2),)),
    "two optimizers": Case(holds="two"),
    "an optimizer that the observer is not given": Case(holds="one of two"),
    "staged, all anew": Case(begin_a_stage, holds="trainable"),
    "staged, the wrapper alone anew": Case(wrap_anew),
    "frozen later": Case(freeze),
    "frozen as it begins": Case(unfreeze, thawed=True, before=False),
    "replaced": Case(replace_last, expected=(("unreduced-gradient", "last.weight", LATE),)),
    "unfrozen under fully_shard": Case(unfreeze, framework="fsdp2"),
    "unfrozen": Case(unfreeze, expected=UNREDUCED, says=("on all ranks", "Build DistributedDataParallel")),
    "unfrozen, and given to the optimizer": Case(unfreeze_into_a_group, holds="trainable", expected=UNREDUCED),
    "unfrozen, not held": Case(unfreeze, holds="trainable", expected=UNREDUCED),
    "unfrozen behind the wrapper": Case(unfreeze, before=True, expected=(("unreduced-gradient", LAYER, 1),)),
    "not held": Case(
        holds="no last",
        expected=(("update-mismatch", "last.weight, last.bias", 1),),
        says=("nothing trains", "add_param_group"),
    ),
    "not held, and not cleared": Case(
        holds="no last", clears="optimizer", expected=(("update-mismatch", "last.weight, last.bias", 1),)
    ),
    "not held, fully_shard": Case(
        holds="no last", framework="fsdp2", expected=(("update-mismatch", "last.weight, last.bias", 1),)
    ),
    "unfrozen, not held, fully_shard": Case(
        unfreeze, holds="trainable", framework="fsdp2", expected=(("update-mismatch", LAYER, LATE),)
    ),
}


def optimizers_of(case: Case, module: Net) -> list[torch.optim.Optimizer]:
    every, trainable = list(module.parameters()), [p for p in module.parameters() if p.requires_grad]
    last = {id(p) for p in module.last.parameters()}
    rest = [p for p in trainable if id(p) not in last]
    groups = {
        "all": [every],
        "trainable": [trainable],
        "two": [rest, list(module.last.parameters())],
        "one of two": [rest, list(module.last.parameters())],
        "no last": [rest],
    }[case.holds]
    return [torch.optim.SGD(group, lr=0.1) for group in groups]


def train(directory: str, case: Case) -> tuple[list[dict[str, Any]], str]:
    torch.manual_seed(0)
    module = Net()
    if case.thawed:
        module.second.requires_grad_(True)
    observers: list[Any] = []
    optimizers: list[torch.optim.Optimizer] = []

    def wrap() -> None:
        if case.framework == "fsdp2":
            for layer in (module.second, module.last):
                torch.distributed.fsdp.fully_shard(layer)
            script.model = torch.distributed.fsdp.fully_shard(module)
        else:
            options: dict[str, Any] = {"find_unused_parameters": True}
            wrapper = DistributedDataParallel
            if case.framework == "ddp, delayed":
                wrapper = DelayedReduction
                options["delay_all_reduce_named_params"] = [("last.weight", module.last.weight)]
                options["param_to_hook_all_reduce"] = module.down.weight
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(case.ignores))
            script.model = wrapper(module, **options)

    def attach() -> None:
        if not directory:
            return
        given = script.optimizers[:1] if case.holds == "one of two" else script.optimizers
        for observer in observers:
            observer.close()
        block: dict[str, Any] = {
            "output_dir": str(Path(directory, str(len(observers)))),
            "tensorboard": False,
            "preflight": False,
        }
        block |= {"coverage": False, "integrity": {"replica_interval": 1}}
        observers.append(ds_silent.attach(script.model, block, optimizer=given))

    script = Script(module, None, optimizers, attach, wrap)
    wrap()
    if case.thawed:
        module.second.requires_grad_(False)
    optimizers += optimizers_of(case, module)
    if case.before and case.late is not None:
        case.late(script)
    attach()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        if step == LATE and case.late is not None and not case.before:
            case.late(script)
        loss = script.model(torch.randn(4, WIDTH, generator=generator))
        loss.backward()
        for optimizer in script.optimizers:
            optimizer.step()
        if case.clears == "module":
            script.model.zero_grad()
        for optimizer in script.optimizers:
            optimizer.zero_grad()
    for observer in observers:
        observer.close()
    held = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters()]
    files = sorted(Path(directory).glob("*/events.jsonl")) if directory and dist.get_rank() == 0 else []
    return [event for file in files for event in read_events(file)], hash_of(held)


def train_all(directory: str) -> dict[str, tuple[list[dict[str, Any]], str]]:
    return {name: train(str(Path(directory, str(place))), case) for place, (name, case) in enumerate(CASES.items())}


def train_healthy(directory: str) -> dict[str, tuple[list[dict[str, Any]], str]]:
    return {name: train("", case) for name, case in CASES.items() if not case.expected}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[dict[str, Any]], str]]:
    results = run_on_kept_ranks(train_all, 3, (str(tmp_path_factory.mktemp("untrained")),), timeout=400)
    return dict(results[0])


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_fact_at_its_first_step(name: str, found: dict[str, tuple[list[dict[str, Any]], str]]) -> None:
    case, (events, _) = CASES[name], found[name]
    wrong = [event for event in events if event["severity"] != "info"]
    assert [(one["kind"], one["where"], one["step"]) for one in wrong] == list(case.expected), wrong
    for words in case.says:
        assert words in wrong[0]["message"] + wrong[0]["remedy"]


def test_what_the_wrapper_was_told_to_ignore_is_noted(
    found: dict[str, tuple[list[dict[str, Any]], str]],
) -> None:
    events, _ = found["told to ignore a layer"]
    first = [(one["kind"], one["severity"], one["where"], one["step"], one["ranks"]) for one in events[:1]]
    assert first == [("unreduced-gradient", "info", "last.weight", 1, [])]


def test_weights_are_those_of_a_training_without_an_observer(
    found: dict[str, tuple[list[dict[str, Any]], str]],
) -> None:
    plain = run_on_kept_ranks(train_healthy, 3, ("",), timeout=400)[0]
    assert {name: weights for name, (_, weights) in plain.items()} == {name: found[name][1] for name in plain}


def known_parameters() -> dict[str, bool]:
    """Whether the reducer's parameters are known, whatever the script holds."""
    found = {}
    for name in ("plain", "frozen", "ignored", "frozen later", "a graph is held", "thawed later"):
        module = Net()
        if name == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["up.weight", "last.bias"])
        graph = module(torch.randn(2, WIDTH)) if name == "a graph is held" else None
        ignored = {"up.weight", "last.bias"} if name == "ignored" else set()
        expected = {id(p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored}
        ddp = DistributedDataParallel(module)
        if name == "frozen later":
            module.last.requires_grad_(False)
        if name == "thawed later":
            module.second.requires_grad_(True)
        flags = [p.requires_grad for p in module.parameters()]
        found[name] = reduced_parameters(ddp) == expected and flags == [p.requires_grad for p in module.parameters()]
        del graph
    return found


def test_which_parameters_a_reducer_has() -> None:
    found = run_on_kept_ranks(known_parameters, 2)[0]
    assert all(found.values()), found


def train_by_masters(directory: str) -> list[list[tuple[int, str, str]]]:
    """The optimizer holds fp32 copies of bf16 weights, which the script writes back, or forgets to."""
    told = []
    for kind, rate in (("written", 1e-3), ("written in small steps", 1e-5), ("written as data", 1e-3), ("not", 1e-3)):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16())
        weights = list(model.parameters())
        masters = [weight.detach().float().requires_grad_() for weight in weights]
        optimizer = torch.optim.AdamW(masters, lr=rate)
        torch.manual_seed(1 + dist.get_rank())
        config = {"output_dir": f"{directory}/{kind}", "tensorboard": False}
        with ds_silent.observe(model, optimizer, config=config):
            for _ in range(12):
                model(torch.randn(4, WIDTH).bfloat16()).float().square().mean().backward()
                for master, weight in zip(masters, weights, strict=True):
                    assert weight.grad is not None
                    master.grad = weight.grad.float()
                optimizer.step()
                model.zero_grad()
                for master, weight in zip(masters, weights, strict=True):
                    if kind != "not":
                        with torch.no_grad():
                            (weight.data if kind == "written as data" else weight).copy_(master)
        events = read_events(Path(directory, kind, "events.jsonl"))
        told.append([(e["step"], e["kind"], e["severity"]) for e in events if e["severity"] != "info"])
    return told


def test_weights_that_a_script_writes_from_masters_are_trained(tmp_path: Path) -> None:
    """Once a warning at step 1: nothing trains what the script calls trainable."""
    *written, forgotten = run_on_kept_ranks(train_by_masters, 2, (str(tmp_path),))[0]
    assert written == [[], [], []]
    assert forgotten == [(8, "update-mismatch", "warning")]


def test_a_wrapper_that_python_is_about_to_free_is_no_other() -> None:
    """Its reducer may outlive its attributes: once that was an internal error, and the observation was over."""
    emptied = DistributedDataParallel.__new__(DistributedDataParallel)
    emptied.__dict__.clear()
    assert _others(None)[0] == set()
    assert vars(emptied) == {}


def test_a_method_that_is_followed_is_no_checkpoint() -> None:
    """Each method that a patch wraps runs the same code, evaluations of sentence-transformers in one of them."""

    class Evaluation:
        def run(self, asked: Callable[[Any], bool]) -> bool:
            return asked(sys._getframe())

    def inside(x: Tensor) -> Tensor:
        found.append(_in_reentrant_checkpoint(sys._getframe()))
        return x

    found: list[bool] = []
    patches = Patches()
    try:
        for kind, name in ((checkpoint.CheckpointFunction, "forward"), (Evaluation, "run")):
            patches.wrap_method(kind, name, lambda original, *args, **named: original(*args, **named))
        assert not Evaluation().run(_in_reentrant_checkpoint)
        checkpoint.checkpoint(inside, torch.ones(2), use_reentrant=True)
        checkpoint.checkpoint(inside, torch.ones(2, requires_grad=True), use_reentrant=True)
    finally:
        patches.undo()
    assert found == [True, False]


@pytest.mark.parametrize(("kept", "told"), [("what no optimizer holds", 0), ("another's", 1)])
def test_a_framework_that_keeps_no_gradient_is_not_asked_for_one(kept: str, told: int) -> None:
    """ZeRO takes the gradients of what its optimizer holds; what was left out of the optimizer keeps its own."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    reduced = {0 if kept == "another's" else 2: torch.ones(2)}
    framework: Any = SimpleNamespace(
        names=["a", "b", "left out"],
        parameters=weights,
        parameter_groups=lambda: [weights[:2]],
        reduced=reduced.get,
        step=1,
        module=nn.Module(),
    )
    rule = NoGradient(framework)
    found = [rule.breaches() for _ in range(20)]
    assert [len(breaches) for breaches in found] == 15 * [0] + 5 * [told]
    assert [breach.where for breach in found[-1]] == told * ["b"]
