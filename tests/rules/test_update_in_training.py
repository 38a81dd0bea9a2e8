"""The rule in real trainings: DDP, FSDP2 and ZeRO are silent, and tell what their optimizer leaves out.

DeepSpeed's stage 0 steps its optimizer once without gradients in bf16 and fp16, which is a note.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.frameworks.deepspeed.engine import base_optimizers
from ds_silent.rules.optimizer_update import UpdateRule
from ds_silent.sinks.jsonl import read_events
from tests.support import ddp_training, training
from tests.support.ddp_training import DDPCase, FSDP2Case
from tests.support.distributed import each, run_on_kept_ranks
from tests.support.training import Case

STEPS = 5
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, Case] = {
    **{f"zero-{stage}": Case(stage) for stage in range(4)},
    **{f"zero-{stage}-bf16": Case(stage, "bf16", clipping=0.1) for stage in range(4)},
    **{f"zero-{stage}-fp16": Case(stage, "fp16") for stage in range(1, 4)},
    "zero-1-adam": Case(1, "bf16", optimizer="Adam", accumulation=2),
    "zero-2-offload": Case(2, zero=OFFLOAD),
    "zero-3-offload": Case(3, "bf16", zero=OFFLOAD),
    "zero-3-parts": Case(3, zero={"sub_group_size": 300}),
    "ddp": DDPCase(),
    "ddp-bf16": DDPCase(dtype="bf16"),
    "ddp-scaled": DDPCase(scaled=True, clipping=0.1),
    "ddp-closure": DDPCase(closure=True),
    "fsdp2": FSDP2Case(),
    "fsdp2-bf16": FSDP2Case(reduce_dtype="fp32"),
}
SEEN = "zero-0", "zero-1-bf16", "zero-2-offload", "zero-3", "ddp", "ddp-closure", "fsdp2"
UNSEEN = ("ddp-bf16",)  # rounding hides it


def train(directory: Path, names: list[str], wrong: bool) -> list[tuple[str, int, list[str]]]:
    """Return how many calls were judged in each training, and what was told."""
    of_adam = importlib.import_module("torch.optim.adam")
    original, judged = of_adam.adam, 0
    judge = UpdateRule._judge

    def counted(rule: UpdateRule, *given: Any) -> None:
        nonlocal judged
        judged += 1
        judge(rule, *given)

    def without_decay(*lists: Any, **settings: Any) -> None:
        original(*lists, **{**settings, "weight_decay": 0.0})

    UpdateRule._judge = counted  # type: ignore[method-assign]
    if wrong:
        of_adam.adam = without_decay
    found = []
    for name in names:
        judged, case, place = 0, CASES[name], directory / name
        if isinstance(case, DDPCase):
            trace: Any = ddp_training.train_ddp(case, place, STEPS, True)
        else:
            params = {
                "optimizer": {"type": case.optimizer, "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}}
            }
            trace = training.train(replace(case, top={**case.top, **params}), place, STEPS, True)
        events = [event for event in trace.events if event["kind"] == "update-mismatch"]
        moments = [event for event in events if event["where"] == "bf16 moments"]  # by their dtype: of no step
        events = [event for event in events if event not in moments]
        assert [event["severity"] for event in moments] == ["info"] * (name == "ddp-bf16" and not dist.get_rank())
        off = [event for event in trace.events if event["kind"] == "observer-off"]
        assert not off, off
        found.append(
            (name, judged, [f"{e['step']} {e['phase']} {e['ranks']} {e['where']}: {e['message']}" for e in events])
        )
    of_adam.adam, UpdateRule._judge = original, judge  # type: ignore[method-assign]
    return found


def test_healthy_trainings_are_silent_and_are_judged(tmp_path: Path) -> None:
    (first, *_) = run_on_kept_ranks(train, 2, (tmp_path, list(CASES), False), timeout=600)
    assert [name for name, _, told in first if told] == ["zero-0-bf16"]
    assert [name for name, judged, _ in first if not judged] == []


def test_a_decay_that_is_left_out_is_told_in_every_framework(tmp_path: Path) -> None:
    (first, *_) = run_on_kept_ranks(train, 2, (tmp_path, [*SEEN, *UNSEEN], True), timeout=600)
    told = {name: said for name, _, said in first}
    assert [name for name in UNSEEN if told[name]] == []
    for name in SEEN:
        assert told[name][0].startswith("2 started [] "), "found at step 1, read at the next one"
        assert "no weight decay" in told[name][0]


def begin(place: Path, case: Case, how: str) -> list[dict[str, Any]]:
    """Train three steps, resumed or with the counters set back, and return what was told of the update."""
    if case.dtype == "fp16":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    engine, generator = training.build(case, place / how), torch.Generator().manual_seed(1)
    if how == "resumed":
        before = training.build(case, place / "before", enabled=False)
        training.one_step(before, generator)
        before.save_checkpoint(str(place / "saved"))
        engine.load_checkpoint(str(place / "saved"))
    if how == "set back":
        for state in base_optimizers(engine)[0].state.values():
            state["step"].zero_()
    for _ in range(3):
        training.one_step(engine, generator)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()
    path = place / how / "events.jsonl"
    return [event for event in read_events(path) if event["kind"] == "update-mismatch"] if path.exists() else []


BEGUN = (
    *((0, dtype, "begun") for dtype in ("bf16", "fp16")),
    *((0, "bf16", how) for how in ("resumed", "set back")),
    *((1, "bf16", how) for how in ("begun", "resumed")),
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, list[dict[str, Any]]]]:
    """By rank and by stage, dtype and how it has begun."""
    directory = tmp_path_factory.mktemp("begun")
    cases = {case: (directory / str(case), Case(case[0], case[1]), case[2]) for case in BEGUN}
    return run_on_kept_ranks(each, 2, (begin, cases))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_0_counts_a_step_without_gradients_which_is_a_note(begun: Any, dtype: str) -> None:
    [event] = begun[0][0, dtype, "begun"]
    told = {key: event[key] for key in ("step", "severity", "ranks", "where", "message")}
    assert told == {
        "step": 2,
        "severity": "info",
        "ranks": [],
        "where": "step counter",
        "message": "AdamW counts 1 step more than it has taken: its counter moved on while its moments stayed 0, as "
        "in a step without gradients. So its bias correction is that of later steps: its first three updates are "
        "0.744, 0.858 and 0.91 times what the formula gives for steps 1, 2 and 3.",
    }


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "resumed"), (0, "set back"), (1, "begun"), (1, "resumed")], ids=lambda v: str(v)
)
def test_a_count_of_steps_that_were_taken_is_none(begun: Any, stage: int, how: str) -> None:
    assert [of_rank[stage, "bf16", how] for of_rank in begun] == [[], []]
