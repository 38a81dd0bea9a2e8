"""One rank goes on from an older checkpoint: an error that names it, and observation goes on; or ends the training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, Probe, build, one_step

WIDTH, STEPS = 8, 4


def _block(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "tensorboard": False,
        "preflight": False,
        "direction": {"sketch_size": 1024},
        **more,
    }


def _run(model: Any, optimizer: Any, schedule: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _new() -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def _resumed(directory: str, older: bool, block: dict[str, Any]) -> dict[str, Any]:
    """Two checkpoints of one training, and a second one that goes on from them."""
    folder = Path(directory, f"{older}-{block.get('interval', 1)}-{'detectors' in block}")
    parts = _new()
    observer = ds_silent.attach(parts[0], optimizer=parts[1], config=_block(folder))
    assert observer is not None
    kept = []
    for part in range(2):
        _run(*parts, STEPS, seed=10 * part)
        kept.append(copy.deepcopy([observer.state_dict(), *(one.state_dict() for one in parts)]))
    observer.close()
    states = kept[0 if older and dist.get_rank() == 1 else 1]
    parts = _new()
    observer = ds_silent.attach(parts[0], optimizer=parts[1], config=_block(folder, **block))
    assert observer is not None
    for one, state in zip((observer, *parts), states, strict=True):
        one.load_state_dict(state)
    status: Any = None
    try:
        _run(*parts, STEPS, seed=50)
    except SystemExit as error:
        status = error.code
    observer.close()
    if dist.get_rank():
        return {"status": status}
    return {
        "status": status,
        "events": [event for event in read_events(folder / "events.jsonl") if event["step"] > 2 * STEPS],
        "steps": [record["step"] for record in read_metrics(folder / "metrics.jsonl")],
    }


def _resumes(directory: str) -> list[dict[str, Any]]:
    stop = {"detectors": {"stop_on": "error"}}
    cases: tuple[tuple[bool, dict[str, Any]], ...] = ((True, {}), (True, {"interval": 2}), (True, stop), (False, {}))
    return [_resumed(directory, older, block) for older, block in cases]


def test_it_is_an_error_that_names_the_rank_and_observation_goes_on(tmp_path: Path) -> None:
    results = run_on_kept_ranks(_resumes, 3, (str(tmp_path),), timeout=300)
    first = 2 * STEPS + 1
    for number, (older, every, status) in enumerate(((True, 1, None), (True, 2, None), (True, 1, 3), (False, 1, None))):
        assert [result[number]["status"] for result in results] == [status] * 3
        events = results[0][number]["events"]
        found = [event for event in events if event["severity"] != "info"]
        told = [("initial-weights-mismatch", "error", [1], "checkpoint", first)] if older else []
        assert [tuple(e[k] for k in ("kind", "severity", "ranks", "where", "step")) for e in found] == told, events
        if older:
            assert "(5 on rank 1, 9 on ranks 0, 2): another checkpoint" in found[0]["message"]
        steps = [step for step in results[0][number]["steps"] if step >= first]
        if status is None:
            assert steps == [step for step in range(first, first + STEPS) if step % every == 0]
            kinds = {event["kind"] for event in events if event["message"].startswith("Follows from the initial")}
            assert kinds == ({"config-mismatch", "replica-drift"} if older else set()), events


def _attached_later(directory: str, shift: int) -> dict[str, Any]:
    """DeepSpeed counts: the engine was at another step before the observer came."""
    config = Case(stage=1).config(Path(directory), enabled=False)
    torch.manual_seed(1234)
    model = Probe(None)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.global_steps = 20 - shift * (dist.get_rank() == 1)
    observer = ds_silent.attach(engine, config=_block(Path(directory, str(shift)), interval=3))
    assert observer is not None
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    for _ in range(7):
        engine.backward(engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False))
        engine.step()
    observer.close()
    engine.destroy()
    if dist.get_rank():
        return {}
    folder = Path(observer.output_dir)
    return {
        "events": list(read_events(folder / "events.jsonl")) if (folder / "events.jsonl").exists() else [],
        "steps": [record["step"] for record in read_metrics(folder / "metrics.jsonl")],
    }


def _both_attached_later(directory: str) -> list[dict[str, Any]]:
    return [_attached_later(directory, shift) for shift in (4, 0)]


def test_an_engine_that_is_elsewhere_when_the_observer_comes(tmp_path: Path) -> None:
    older, healthy = run_on_kept_ranks(_both_attached_later, 3, (str(tmp_path),), timeout=300)[0]
    found = [event for event in older["events"] if event["severity"] != "info"]
    assert [(e["kind"], e["ranks"], e["step"]) for e in found] == [("initial-weights-mismatch", [1], 21)], older
    assert older["steps"] == healthy["steps"] == [21, 24, 27]
    assert healthy["events"] == []


def resumed(directory: str) -> None:
    """Three times from a state with a checksum: of other weights, of these, and of an older version."""
    for name, key, other in (
        ("other", "weights_checksum", True),
        ("same", "weights_checksum", False),
        ("old", "weights", True),
    ):
        engine = build(Case(), Path(directory, name))
        observer, generator = ds_silent.observer_of(engine), torch.Generator().manual_seed(dist.get_rank())
        assert observer is not None
        state = observer.state_dict()
        observer.load_state_dict({**state, "weights_checksum": None, key: "0" * 16 if other else state.get(key)})
        for _ in range(3):
            one_step(engine, generator)
        engine.destroy()


def test_a_checksum_of_other_weights_is_told_and_one_of_an_older_version_is_left(tmp_path: Path) -> None:
    run_on_kept_ranks(resumed, 2, (str(tmp_path),))
    for name, expected in (("other", ["initial-weights-mismatch"]), ("same", []), ("old", [])):
        events = [e for e in read_events(tmp_path / name / "events.jsonl") if e["severity"] != "info"]
        assert [e["kind"] for e in events] == expected, name
