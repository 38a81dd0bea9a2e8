"""What one rank's modules, optimizer and autocast are set to that the others' are not: told with rank and layer.

Real trainings on gloo ranks under DDP and FSDP2, each of which is healthy but for one line of one rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.local_settings import Autocast
from ds_silent.drill.verdicts import alarms
from ds_silent.patches import Patches
from ds_silent.preflight.messages import own_parts
from ds_silent.preflight.settings import WINDOW, Numbers, counters_of, settings_of
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_on_kept_ranks

ROWS, WIDTH, STRIKE, STEPS, ODD = 4, 8, 3, 6, 1


class Block(nn.Module):
    """Its constructor takes what it is set to; it counts its own calls, and knows its rank."""

    def __init__(self, width: int, drop_prob: float = 0.0):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.GroupNorm(2, width)
        self.drop = nn.Dropout(0.1)
        self.drop_prob, self.calls, self.rank = drop_prob, 0, dist.get_rank() if dist.is_initialized() else 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1 + self.rank
        return rows + self.drop(self.norm(self.linear(rows)))


class Net(nn.Module):
    enters_autocast = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        inside = torch.autocast("cpu", torch.bfloat16) if self.enters_autocast else nullcontext()
        with inside:
            hidden = rows
            for layer in self.layers:
                hidden = layer(hidden)
            return (self.last(hidden).float() - rows.sum(1, keepdim=True)).square().mean()


@dataclass(frozen=True)
class Case:
    name: str
    framework: str = "ddp"
    preflight: bool = True
    autocast: str = ""  # of all ranks


def _dropout(model: Any) -> None:
    model.layers[1].drop.p = 0.0


def _all_dropout(model: Any) -> None:
    for layer in model.layers:
        layer.drop.p = 0.0


def _groups(model: Any) -> None:
    model.layers[2].norm.num_groups = 4


def _eps(model: Any) -> None:
    model.layers[0].norm.eps = 1e-3


def _own(model: Any) -> None:
    model.layers[0].drop_prob = 0.25


BEFORE: dict[str, Callable[[Any], None]] = {"all dropout at once": _all_dropout, "dropout at once": _dropout}
LATER: dict[str, Callable[[Any], None]] = {"dropout": _dropout, "groups": _groups, "eps": _eps, "own": _own}


def _wrapped(case: Case, model: Net) -> Any:
    if case.framework == "ddp":
        return DistributedDataParallel(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _optimizer(case: Case, model: Any, odd: bool) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    if case.name == "lacks a layer" and odd:
        named = [(name, p) for name, p in named if "layers.1." not in name]
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def _train(case: Case, directory: str) -> list[dict[str, Any]]:
    """Events, on rank 0."""
    rank, folder = dist.get_rank(), Path(directory, f"{case.name}-{case.framework}-{case.preflight}".replace(" ", "_"))
    odd = rank == ODD
    torch.manual_seed(5)
    model = Net()
    model.enters_autocast = case.name == "autocast within" and odd
    if odd and case.name in BEFORE:
        BEFORE[case.name](model)
    trained = _wrapped(case, model)
    optimizer = _optimizer(case, model, odd)
    block = {
        "output_dir": str(folder),
        "tensorboard": False,
        "preflight": case.preflight,
        "direction": {"sketch_size": 1024},
        "integrity": {"replica_interval": 0},
    }
    observer = ds_silent.attach(trained, optimizer=optimizer, config=block)
    assert observer is not None
    generator = torch.Generator().manual_seed(70 + rank)
    for step in range(1, STEPS + 1):
        if odd and step == STRIKE:
            LATER.get(case.name, lambda model: None)(model)
            if case.name == "counter":
                for state in optimizer.state.values():
                    state["step"] -= 1
        if case.name == "schedule":  # of all ranks, at once
            for layer in model.layers:
                layer.drop.p = 0.01 * step
        on = case.autocast or ("bfloat16" if case.name == "autocast" and odd and step >= STRIKE else "")
        with torch.autocast("cpu", torch.bfloat16) if on else nullcontext():
            loss = trained(torch.randn(ROWS, WIDTH, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()
    return list(read_events(folder / "events.jsonl")) if rank == 0 and (folder / "events.jsonl").exists() else []


def _train_all(cases: tuple[Case, ...], directory: str) -> list[Any]:
    return [_train(case, directory) for case in cases]


def train(cases: tuple[Case, ...], ranks: int) -> list[tuple[Case, list[dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as directory:
        done = run_on_kept_ranks(_train_all, ranks, (cases, directory), timeout=300)[0]
    return list(zip(cases, done, strict=True))


TOLD = {  # step, where, words
    "dropout at once": (0, "settings of layers.1", "p 0.1 on ranks 0, 2; p 0.0 on rank 1"),
    "all dropout at once": (0, "settings of layers.0", "p 0.1 on ranks 0, 2; p 0.0 on rank 1"),
    "dropout": (STRIKE, "settings of layers.1", "p 0.1 on ranks 0, 2; p 0.0 on rank 1"),
    "groups": (STRIKE, "settings of layers.2", "num_groups 2 on ranks 0, 2; num_groups 4 on rank 1"),
    "eps": (STRIKE, "settings of layers.0", "on ranks 0, 2; eps 0.001"),
    "own": (STRIKE, "settings of layers.0", "drop_prob 0.0 on ranks 0, 2; drop_prob 0.25 on rank 1"),
    "autocast": (STRIKE, "autocast", "off on ranks 0, 2; bfloat16 on rank 1"),
    "autocast within": (1, "autocast", "off on ranks 0, 2; bfloat16 on rank 1"),
    "lacks a layer": (0, "optimizer's parameters of layers.1", "none of 4, without layers.1.linear.weight on rank 1"),
    "counter": (STRIKE, "optimizer's step", "2 on ranks 0, 2; 1 on rank 1"),
}


@pytest.mark.long
def test_a_setting_of_one_rank_is_told_with_rank_layer_and_values() -> None:
    cases = (
        *(Case(name) for name in TOLD),
        *(Case(name, "fsdp2") for name in ("dropout at once", "groups", "counter", "autocast")),
        Case("dropout at once", preflight=False),
        Case("lacks a layer", preflight=False),
    )
    for case, events in train(cases, 3):
        found = alarms(events)
        step, where, words = TOLD[case.name]
        assert [(e["kind"], e["ranks"], e["severity"]) for e in found] == [("config-mismatch", [ODD], "error")], (
            case,
            found,
        )
        assert (found[0]["step"], found[0]["where"]) == (step if case.preflight else 1, where), (case, found)
        assert words in found[0]["message"], (case, found[0]["message"])


def test_of_two_ranks_none_is_named() -> None:
    for case, events in train((Case("dropout at once"), Case("autocast")), 2):
        found = alarms(events)
        assert [(e["kind"], e["ranks"], e["where"]) for e in found] == [("config-mismatch", [], TOLD[case.name][1])], (
            case
        )


def test_health_is_silent() -> None:
    """Calls counted, a rank known, dropout by a schedule, autocast on all ranks."""
    cases = (Case("healthy"), Case("schedule"), Case("healthy autocast", autocast="bfloat16"), Case("healthy", "fsdp2"))
    for case, events in train(cases, 3):
        assert alarms(events) == [], case


def _under_zero(directory: str, stage: int, autocasts: bool) -> list[dict[str, Any]]:
    """Under DeepSpeed, whose base optimizer has flat copies: a counter falls behind, then a dropout changes.

    Args:
        autocasts: in their place one rank's forwards are cast.
    """
    import deepspeed

    odd, folder = dist.get_rank() == ODD, Path(directory, str(stage))
    torch.manual_seed(5)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "train_batch_size": ROWS * dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "silent_consistency": {"output_dir": str(folder), "tensorboard": False, "direction": {"sketch_size": 1024}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    observer = ds_silent.attach(engine)
    assert observer is not None
    generator = torch.Generator().manual_seed(70 + dist.get_rank())
    for step in range(1, STEPS + 1):
        if odd and step == STRIKE and not autocasts:
            for state in engine.basic_optimizer.state.values():
                state["step"] -= 1
        if odd and step == STRIKE + 1 and not autocasts:
            _dropout(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts and odd and step >= STRIKE):
            loss = engine(torch.randn(ROWS, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
    observer.close()
    engine.destroy()
    return [] if dist.get_rank() else list(read_events(folder / "events.jsonl"))


def test_gradients_that_autocast_puts_into_another_order_follow_from_it(tmp_path: Path) -> None:
    """ZeRO-1 and 2 fill their buckets as the gradients come: one rank's order mixes them (DeepSpeed 0.19.8)."""
    events = run_on_kept_ranks(_under_zero, 3, (str(tmp_path), 2, True))[0]
    assert [(e["kind"], e["ranks"], e["step"], e["where"]) for e in alarms(events)] == [
        ("config-mismatch", [ODD], STRIKE, "autocast")
    ]
    notes = [e for e in events if e["kind"] == "aggregation-error"]
    assert [e["step"] for e in notes] == [STRIKE]
    assert notes[0]["message"].startswith(f"Follows from the config-mismatch of step {STRIKE} (autocast): ")


def _every_stage(directory: str) -> list[list[dict[str, Any]]]:
    return [_under_zero(directory, stage, False) for stage in range(4)]


def test_step_counters_and_settings_under_every_zero_stage(tmp_path: Path) -> None:
    for stage, events in enumerate(run_on_kept_ranks(_every_stage, 3, (str(tmp_path),), timeout=300)[0]):
        found = [(e["step"], e["kind"], e["ranks"], e["where"]) for e in alarms(events)]
        assert found == [
            (STRIKE, "config-mismatch", [ODD], "optimizer's step"),
            (STRIKE + 1, "config-mismatch", [ODD], "settings of layers.1"),
        ], (stage, found)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Logits(Tagger):
    """The script makes the loss: no forward is given the labels."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids).flatten(0, 1)


def _label_tokens(directory: str, shares: tuple[float, ...], inside: bool = True) -> list[dict[str, Any]]:
    """Each rank's share of the tokens has a label."""
    rank, folder = dist.get_rank(), Path(directory, f"{shares[1]}-{inside}")
    torch.manual_seed(5)
    trained = DistributedDataParallel(Tagger() if inside else Logits())
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    observer = ds_silent.attach(trained, optimizer=optimizer, config={"output_dir": str(folder), "tensorboard": False})
    assert observer is not None
    generator = torch.Generator().manual_seed(70 + rank)
    for _ in range(24):
        tokens = torch.randint(0, 4, (ROWS, 32), generator=generator)
        labels = tokens.masked_fill(torch.rand(ROWS, 32, generator=generator) > shares[rank], -100)
        if inside:
            trained(input_ids=tokens, labels=labels).backward()
        else:
            nn.functional.cross_entropy(trained(tokens), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()
    events = folder / "events.jsonl"
    return [event for event in read_events(events) if event["where"] == "label tokens"] if rank == 0 else []


def _with_and_without_labels(directory: str) -> list[list[dict[str, Any]]]:
    third, most = (0.9, 0.3, 0.9), (0.9, 0.7, 0.9)
    return [_label_tokens(directory, shares, inside) for shares in (third, most) for inside in (True, False)]


def test_a_third_of_the_label_tokens_is_a_note(tmp_path: Path) -> None:
    *thirds, most, most_outside = run_on_kept_ranks(_with_and_without_labels, 3, (str(tmp_path),))[0]
    for third in thirds:
        assert [(e["kind"], e["severity"], e["ranks"], e["step"]) for e in third] == [
            ("batch-size-mismatch", "info", [1], 20)
        ]
        assert 1 / 0.37 < third[0]["score"] < 1 / 0.3  # 0.3 of 0.9
    assert most == most_outside == []


# -- what is a setting -----------------------------------------------------------------------------------------------


def test_settings_are_what_constructors_take_and_torch_names() -> None:
    assert settings_of(Block(4)) == ["drop_prob"]
    assert settings_of(nn.Dropout(0.2)) == ["p", "inplace"]
    assert {"num_groups", "eps", "affine"} <= set(settings_of(nn.GroupNorm(2, 4)))
    assert {"stride", "padding", "groups", "kernel_size"} <= set(settings_of(nn.Conv2d(2, 2, 3)))
    assert "dropout" in settings_of(nn.LSTM(2, 2))
    assert "approximate" in settings_of(nn.GELU())
    assert "momentum" in settings_of(nn.BatchNorm1d(3))


def test_many_settings_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.preflight.settings.WINDOW", 8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(6)))
    numbers = Numbers(model)
    before = [list(part) for part in numbers.values]
    model[5][1].p = 0.3
    for _ in numbers.values:
        numbers.look()
    assert numbers.values != before
    assert "p 0.3 in 5.1" in numbers.items()[-1].shown
    assert WINDOW > 8


def test_of_lists_only_the_difference_is_shown() -> None:
    assert own_parts(["p 0.1; eps 1", "p 0.0; eps 1"]) == ["p 0.1", "p 0.0"]
    assert own_parts(["a; b", "a; b; c"]) == ["none of these", "c"]
    assert own_parts(["one", "two"]) == ["one", "two"]


def test_step_counters_are_read_wherever_optimizers_keep_them() -> None:
    parameter = nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([parameter])
    assert list(counters_of(adam)) == []
    parameter.sum().backward()
    adam.step()
    assert list(counters_of(adam)) == [1.0]
    adam.param_groups[0]["step"] = 7
    assert list(counters_of(adam)) == [7.0, 1.0]


def test_a_compiled_model_is_off_whenever_it_is_traced() -> None:
    """Shapes that one rank alone meets make it trace again."""
    model, autocast, patches = Net(), Autocast(), Patches()
    model.enters_autocast = True
    states = []
    autocast.connect(patches, lambda act, *arguments: act(*arguments))
    for compiled in (model, torch.compile(model, backend="aot_eager"), model):
        for rows in (2, 3, 3):
            autocast.before_forward("cpu")
            compiled(torch.ones(rows, WIDTH))
            autocast.after_forward()
            states.append(autocast.state)
    patches.undo()
    assert states[:3] == [("bfloat16",)] * 3
    assert states[3:] == [("off",)] * 6
    assert torch.autocast.__enter__.__qualname__ == "autocast.__enter__"


def test_what_breaks_as_autocast_is_entered_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script enters it in its own thread: an error of ours must not come out of its ``with``."""
    patches, autocast, broken = Patches(), Autocast(), []

    def alone(act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except RuntimeError as error:
            broken.append(error)

    autocast.connect(patches, alone)
    autocast.before_forward("cpu")
    monkeypatch.setattr("ds_silent.capture.local_settings._autocast_of", _breaks)
    with torch.autocast("cpu"):
        pass
    patches.undo()
    assert len(broken) == 1


def _breaks(device: str) -> None:
    raise RuntimeError(device)
