"""What the observer promises about itself: it ends everywhere at once, leaves no trace, hides nothing, never hangs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, VOCABULARY
from ds_silent.exchange.collectives import let_gloo_end_first
from ds_silent.measure.row_tracker import RowTracker
from ds_silent.records import Event
from ds_silent.runs import read_run, verdict_of
from ds_silent.runs.watch_command import HEALTHY, WARNING, status_of
from ds_silent.runs.watched import Watched
from ds_silent.sinks.jsonl import read_events, read_metrics
from ds_silent.sinks.run_directory import process_of
from tests.support.collectives import Call, check_collectives, record_collectives
from tests.support.ddp_training import DDPCase
from tests.support.ddp_training import build as build_ddp
from tests.support.distributed import each, run_distributed, run_on_kept_ranks
from tests.support.interpreter import interpreter
from tests.support.made_records import Run
from tests.support.traced_training import Cell
from tests.support.traced_training import train as train_traced
from tests.support.training import ROWS, Case, Probe, Trace, build, one_step, train

ROOT = Path(__file__).resolve().parents[2]


# -- an internal error -----------------------------------------------------------------------------


def break_one_rank(directory: str, where: str) -> dict[str, Any]:
    """Rank 1's observer breaks inside at step 3; the training goes on for 8."""
    case, rank = Case(stage=1), dist.get_rank()
    plain = train(case, Path(directory) / "off", 8, enabled=False)
    engine = build(case, Path(directory) / "on")
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    capture = observer._capture
    if rank == 1:
        target, name = {"hook": (capture._local.accumulator, "add"), "boundary": (capture, "_hashes")}[where]
        original = getattr(target, name)

        def breaks(*args: Any, **kwargs: Any) -> Any:
            if capture.step == 3:
                raise RuntimeError("injected")
            return original(*args, **kwargs)

        setattr(target, name, breaks)
    generator = torch.Generator().manual_seed(99 + rank)
    measuring = []
    for _ in range(8):
        one_step(engine, generator)
        measuring.append(observer.measures(100))
    from tests.support.training import _hash_weights

    return {"measuring": measuring, "weights": _hash_weights(engine), "plain": plain.weights}


def test_an_internal_error_ends_observation_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    cases = {where: (str(tmp_path / where), where) for where in ("hook", "boundary")}
    ranks = run_on_kept_ranks(each, 2, (break_one_rank, cases))
    for where in cases:
        for result in (of_rank[where] for of_rank in ranks):
            assert result["measuring"] == [True] * 3 + [False] * 5, where  # step 4 reads what step 3 sent
            assert result["weights"] == result["plain"], where
        directory = tmp_path / where / "on"
        assert [record["step"] for record in read_metrics(directory / "metrics.jsonl")] == [1, 2], where
        [event] = read_events(directory / "events.jsonl")
        assert (event["kind"], event["step"], event["ranks"]) == ("observer-off", 3, [1]), where


# -- a rank that is killed -------------------------------------------------------------------------


def kill_one_rank(directory: str) -> None:
    engine = build(Case(), Path(directory) / "on")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        if step == 5:
            ds_silent.observer_of(engine).flush()  # what its thread still holds of step 4 would die with rank 1
            dist.barrier()
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        one_step(engine, generator)


def test_when_a_rank_is_killed_the_others_end_and_the_records_stay(tmp_path: Path) -> None:
    run_distributed(kill_one_rank, 2, (str(tmp_path),), timeout=60, may_die=(0, 1))
    steps = [record["step"] for record in read_metrics(tmp_path / "on" / "metrics.jsonl")]
    assert steps[:4] == [1, 2, 3, 4]


def ends_somehow(directory: str, how: str) -> None:
    """Both ranks, after 4 steps; rank 1 has read the records before."""
    model, optimizer = build_ddp(DDPCase())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}) as observer:
        for _ in range(4):
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            optimizer.step()
            optimizer.zero_grad()
        observer.flush()
        dist.barrier()
        if dist.get_rank() == 1:
            Path(directory, "said").write_text(verdict_of(read_run(directory)).sentence)
        dist.barrier()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise ValueError("the script's own")


@pytest.mark.parametrize("how", ["killed", "raised", "ended"])
def test_a_run_that_broke_off_is_not_called_healthy(how: str, tmp_path: Path) -> None:
    run_distributed(ends_somehow, 2, (str(tmp_path), how), may_die=() if how == "ended" else (0, 1))
    healthy = "oth ranks agreed at all 4 measured steps; not checked: "
    assert (tmp_path / "said").read_text().startswith(f"B{healthy}"), "while it goes on"
    verdict = verdict_of(read_run(tmp_path))
    begins = {
        "killed": "The run was killed or crashed after step 4: its end is not recorded, nor which rank ended first; "
        f"until then b{healthy}",
        "raised": f"The training ended with ValueError after step 4; until then b{healthy}",
        "ended": f"B{healthy}",
    }
    assert verdict.sentence.startswith(begins[how])
    view = Watched(tmp_path)
    while view.poll():
        pass
    assert status_of(view.snapshot(), None, time.time()) == (HEALTHY if how == "ended" else WARNING)


def test_a_run_whose_disk_is_full_was_not_killed(tmp_path: Path) -> None:
    facts = {"version": 1, "ended": None, "process": {**process_of(os.getpid()), "began": 0}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert verdict_of(read_run(tmp_path)).sentence.startswith("The run was killed or crashed after its start: ")
    (tmp_path / "run.json.new").write_text("")
    assert verdict_of(read_run(tmp_path)).sentence.startswith("The run could not write its records any more after ")


def test_a_run_on_another_host_is_lost_only_after_a_long_silence(tmp_path: Path) -> None:
    facts = {
        "version": 1,
        "ended": None,
        "process": {"host": "node7", "pid_namespace": "pid:[1]", "pid": 1, "began": 2},
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "world_size": 2}\n')
    assert read_run(tmp_path).broke_off == ""
    for name in ("run.json", "metrics.jsonl"):
        os.utime(tmp_path / name, (0, 0))
    assert read_run(tmp_path).broke_off.startswith("No end of the run is recorded after step 7, and nothing else for ")
    del facts["ended"]  # of a version that says no end
    (tmp_path / "run.json").write_text(json.dumps(facts))
    os.utime(tmp_path / "run.json", (0, 0))
    assert read_run(tmp_path).broke_off == ""


def left_by_both(directory: str, interrupted: bool) -> None:
    """In step 4, rank 1 before its observation of it and rank 0 behind; or rank 1's observer alone is closed there."""
    model, optimizer = build_ddp(DDPCase())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with (
        suppress(KeyboardInterrupt),
        ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}) as observer,
    ):
        for step in range(1, 7):
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            if step == 4 and dist.get_rank() == 1:
                if interrupted:
                    raise KeyboardInterrupt
                observer.close()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4 and interrupted:
                raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupt_is_no_breakage_of_the_observer(interrupted: bool, tmp_path: Path) -> None:
    run_distributed(left_by_both, 2, (str(tmp_path), interrupted))
    told = [(event["kind"], event["step"]) for event in read_events(tmp_path / "events.jsonl")]
    assert told == ([] if interrupted else [("observer-off", 4)])
    assert read_run(tmp_path).broke_off == ("The training was interrupted after step 4" if interrupted else "")


# -- above the gather limit ------------------------------------------------------------------------


def constant_size(directory: str) -> Trace:
    case = Case(stage=1, accumulation=2, per_layer=False)
    return train(case, Path(directory), 6, enabled=True, oracle=True, gather_limit=1)


def test_constant_size_exchange_matches_the_oracle(tmp_path: Path) -> None:
    trace = run_on_kept_ranks(constant_size, 4, (str(tmp_path),))[0]
    assert [record["step"] for record in trace.records] == [1, 2, 3, 4, 5, 6]
    for record, truth in zip(trace.records, trace.oracle, strict=True):
        direction = record["direction"]
        error = 5 / math.sqrt(1024)
        assert direction["mean_cosine"] == pytest.approx(truth["mean_cosine"], abs=5 * direction["standard_error"])
        assert direction["min_pair"] is None  # pairs are not known: null, not a guess
        assert record["grad_norm"]["method"] == "exact"
        assert record["grad_norm"]["per_rank"] == pytest.approx(truth["grad_norm"]["per_rank"], rel=1e-6)
        assert record["grad_norm"]["aggregated"] == pytest.approx(truth["grad_norm"]["aggregated"], rel=1e-6)
        if record["step"] < 6:
            assert direction["per_rank"] == pytest.approx(truth["per_rank_cosine"], abs=error)
        else:
            assert direction["per_rank"] is None  # would have come with the next step's collective


# -- collectives -----------------------------------------------------------------------------------


def observe_everything(directory: str) -> list[Call]:
    seen = record_collectives()
    for case in (
        Case(reduction="ordered", method="exact", accumulation=2),
        Case(reduction="ordered", stage=1, dtype="bf16", clipping=0.1),
    ):
        train(case, Path(directory) / f"ordered-{case.stage}", 2, enabled=True)
    assert "all_to_all_single" in {name for name, _, _ in seen}
    for limit in (64, 1):
        for case in (Case(method="exact"), Case(stage=2, per_layer=limit == 64, exact_interval=2)):
            train(case, Path(directory) / f"{limit}{case.stage}", 3, enabled=True, gather_limit=limit)
        train_traced(
            Cell("zero3", limit=limit), f"{directory}/traced {limit}"
        )  # its weights are in what is exchanged anyway
        engine = build(Case(), Path(directory) / f"drift-{limit}", gather_limit=limit)
        before = len(seen)
        for step in range(1, 8):
            if step == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    engine.module.frozen.weight[0, 0] += 1.0
            one_step(engine, torch.Generator().manual_seed(step))
        ds_silent.observer_of(engine).close()
        # of the tensor that differs; which one that is and since when, is asked for by all-reduces
        assert [name for name, _, _ in seen[before:]].count("all_gather") == 1
    return seen


def test_collectives_are_those_that_every_backend_has(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(observe_everything, 2, (str(tmp_path),))
    # all_gather is the preflight's, collective, and of what differs between replicas
    check_collectives(ranks, {"all_gather_into_tensor", "all_reduce", "all_to_all_single", "all_gather"})


def observe_in_blocks(directory: str) -> list[Call]:
    seen = record_collectives()
    train(Case(stage=1, per_layer=False), Path(directory), 3, enabled=True, gather_limit=0)
    return seen


def test_in_blocks_only_the_first_ranks_of_blocks_pass_something_on(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(observe_in_blocks, 3, (str(tmp_path),))  # blocks (0, 1) and (2)
    passed = [sum(name == "all_to_all_single" for name, _, _ in seen) for seen in ranks]
    assert passed[0] == passed[2] > 0
    assert passed[1] == 0
    others = [[call for call in seen if call[0] != "all_to_all_single"] for seen in ranks]
    check_collectives(others, {"all_gather_into_tensor", "all_reduce", "all_gather"})
    assert all(dtype == "torch.float32" for name, dtype, _ in ranks[0] if name == "all_to_all_single")


# -- rows ------------------------------------------------------------------------------------------


def follow_rows(directory: str, interval: int) -> list[Any]:
    """Two epochs of 48 rows in steps of 12; in step 3 rank 1 holds rank 0's rows. Resumed after step 3."""
    output, rank = Path(directory) / "on", dist.get_rank()
    block = {"output_dir": str(output), "tensorboard": False, "interval": interval, "direction": {"sketch_size": 256}}
    engine = build(Case(stage=1, accumulation=2), output, enabled=False)
    generator = torch.Generator().manual_seed(rank)
    observer, events = None, []
    for step in range(1, 9):
        if step in (1, 4):
            state = None
            if observer is not None:
                state = json.loads(json.dumps(observer.state_dict()))
                observer.close()
            observer = ds_silent.attach(engine, block)
            observer.on_event(events.append)
            observer.samples_per_epoch = 48
            if state is not None:
                observer.load_state_dict(state)
        for micro in range(2):
            owner = 0 if step == 3 else rank
            first = ((step - 1) % 4) * 12 + owner * 6 + micro * ROWS
            observer.observe_batch(torch.arange(first, first + ROWS))
            one_step(engine, generator)
    observer.close()
    return [(event.step, event.kind, event.ranks) for event in events]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[Any], Path]]:
    """Rank 0's events and the directory, by interval."""
    directory = tmp_path_factory.mktemp("rows")
    cases = {interval: (str(directory / str(interval)), interval) for interval in (1, 2)}
    events = run_on_kept_ranks(each, 2, (follow_rows, cases))[0]
    return {interval: (events[interval], directory / str(interval) / "on") for interval in cases}


@pytest.mark.parametrize("interval", [1, 2])
def test_rows_are_followed_exactly_through_epochs_and_a_resume(interval: int, followed: Any) -> None:
    events, directory = followed[interval]
    coverage = {record["step"]: record["coverage"] for record in read_metrics(directory / "metrics.jsonl")}
    # visits, distinct rows and shared rows after each step, by hand
    truth = {1: (12, 12, 0), 2: (24, 24, 0), 3: (36, 30, 6), 4: (48, 42, 0), 5: (12, 12, 0), 6: (24, 24, 0)}
    for step in range(interval, 7, interval):
        visits, distinct, shared = truth[step]
        assert coverage[step]["duplicates"] == shared, step
        if (interval, step) == (2, 4):  # the checkpoint after step 3 could not hold step 3's rows: not known, not wrong
            assert coverage[step]["seen"] is None
            continue
        assert coverage[step]["seen"] == pytest.approx(distinct / 48, rel=1e-12), step
        assert coverage[step]["repeated"] == pytest.approx((visits - distinct) / 48, abs=1e-12), step
    if interval == 1:
        assert (3, "duplicate-data", (0, 1)) in events


def go_on_after_four_ranks(directory: str) -> list[tuple[int, str, str]]:
    """A checkpoint of four ranks, one of which was an outlier for long, goes on with two."""
    learned = Run(4)
    learned.steps(60)
    learned.until_event(30, scale=3.0)
    state = {"rows": RowTracker().state_dict(False), "judge": learned.judge.state_dict(), "ranks": 4}
    engine = build(Case(), Path(directory) / "on", enabled=False)
    observer = ds_silent.attach(engine, {"output_dir": str(Path(directory) / "on"), "tensorboard": False})
    events: list[Event] = []
    observer.on_event(events.append)
    observer.load_state_dict(json.loads(json.dumps(state)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        one_step(engine, generator)
    own = observer.state_dict()
    observer.close()
    if dist.get_rank() == 0:
        assert (own["ranks"], own["judge"]["outlier"]["ranks"], own["judge"]["episodes"]["active"]) == (2, 2, {})
    return [(event.step, event.kind, event.message) for event in events]


def test_a_resume_with_another_number_of_ranks_judges_anew_and_says_so(tmp_path: Path) -> None:
    events = run_on_kept_ranks(go_on_after_four_ranks, 2, (str(tmp_path),))
    assert [(step, kind) for step, kind, _ in events[0]] == [(1, "ranks-changed")]
    assert "goes on with 2 ranks, its checkpoint is from 4" in events[0][0][2]
    assert events[1] == []
    assert [record["step"] for record in read_metrics(tmp_path / "on" / "metrics.jsonl")] == [1, 2, 3]


# -- coming and going ------------------------------------------------------------------------------


def attach_and_close(directory: str) -> dict[str, Any]:
    case = Case(stage=2)
    engine = build(case, Path(directory) / "on", enabled=False)
    assert ds_silent.observer_of(engine) is None
    parameters = list(engine.module.parameters())
    before = (set(engine.__dict__), [dict(p._backward_hooks or {}) for p in parameters], len(engine._forward_hooks))
    observer = ds_silent.attach(engine, {"output_dir": str(Path(directory) / "on"), "tensorboard": False})
    assert observer is not None
    assert ds_silent.observer_of(engine) is observer
    with pytest.raises(ds_silent.ConfigError, match="already observed"):
        ds_silent.attach(engine)
    generator = torch.Generator().manual_seed(1)
    one_step(engine, generator)
    observer.close()
    dist.barrier()  # rank 0 has written
    after = (set(engine.__dict__), [dict(p._backward_hooks or {}) for p in parameters], len(engine._forward_hooks))
    one_step(engine, generator)
    return {
        "left": sorted(after[0] - before[0]),
        "hooks": before[1:] == after[1:],
        "observer": ds_silent.observer_of(engine),
        "steps": [r["step"] for r in read_metrics(Path(directory) / "on" / "metrics.jsonl")]
        if dist.get_rank() == 0
        else [1],
    }


def test_close_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    for result in run_on_kept_ranks(attach_and_close, 2, (str(tmp_path),)):
        assert result == {"left": [], "hooks": True, "observer": None, "steps": [1]}


def without_block(directory: str) -> list[Any]:
    import deepspeed

    kinds = []
    for enabled in (None, False):
        config = Case().config(Path(directory), enabled=bool(enabled))
        if enabled is False:
            config["silent_consistency"] = {"enabled": False, "nonsense": 1}
        model = Probe(None)
        engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
        kinds.append(
            (type(engine) is deepspeed.DeepSpeedEngine, ds_silent.observer_of(engine), "backward" in engine.__dict__)
        )
    return [kinds, os.listdir(directory)]


def test_without_the_block_nothing_is_there(tmp_path: Path) -> None:
    kinds, files = run_on_kept_ranks(without_block, 1, (str(tmp_path),))[0]
    assert kinds == [(True, None, False)] * 2
    assert files == []


# -- overflow --------------------------------------------------------------------------------------


def overflow(directory: str) -> tuple[Trace, Trace]:
    case = Case(stage=1, dtype="fp16", top={"fp16": {"enabled": True, "initial_scale_power": 30}})
    observed = train(case, Path(directory) / "on", 6, enabled=True)
    return observed, train(case, Path(directory) / "off", 6, enabled=False)


def test_overflow_steps_are_recorded_as_what_they_are(tmp_path: Path) -> None:
    observed, plain = run_on_kept_ranks(overflow, 2, (str(tmp_path),))[0]
    assert observed.weights == plain.weights
    assert [record["step"] for record in observed.records] == [1, 2, 3, 4, 5, 6]
    assert observed.records[0]["grad_norm"]["mean"] in ("inf", "nan")  # the scale is 2^30: every gradient overflows
    assert observed.records[0]["direction"]["mean_cosine"] == "nan"
    assert isinstance(observed.records[0]["loss"]["mean"], float)


# -- refusals --------------------------------------------------------------------------------------


def refuse(changes: dict[str, Any], directory: str) -> str:
    config = Case().config(Path(directory), enabled=True) | changes
    model = Probe(None)
    with pytest.raises((ds_silent.ConfigError, ds_silent.SinkError)) as caught:
        ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return str(caught.value)


def refuse_and_end(changes: dict[str, Any], directory: str) -> tuple[str, bool]:
    """Say, too, whether gloo's threads get their time: the ranks have just agreed that rank 0 cannot write."""
    return refuse(changes, directory), let_gloo_end_first.cache_info().currsize == 1


SUPER_OFFLOAD = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
REFUSED: dict[str, dict[str, Any]] = {  # the sentence, and the change of the ds_config that it is said of
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    "zero_optimization.offload_optimizer.super_offload true": {"zero_optimization": {"stage": 3, **SUPER_OFFLOAD}},
    "optimizer.type OneBitAdam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
    "optimizer.type ZeroOneAdam": {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3}}},
    "sparse_gradients": {"sparse_gradients": True},
    "sketch_size must": {"silent_consistency": {"direction": {"sketch_size": 1000}}},
    'did you mean "silent_consistency"': {"silent_consistancy": {}},
}


def test_what_cannot_be_observed_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases = {sentence: (changes, str(tmp_path)) for sentence, changes in REFUSED.items()}
    for messages in run_on_kept_ranks(each, 2, (refuse, cases)):
        for sentence, message in messages.items():
            assert sentence in message
            assert "\n" not in message


def test_an_output_dir_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    changes = {"silent_consistency": {"output_dir": str(tmp_path / "file" / "below"), "tensorboard": False}}
    for message, gloo_ends_first in run_on_kept_ranks(refuse_and_end, 2, (changes, str(tmp_path))):
        assert str(tmp_path / "file" / "below") in message
        assert gloo_ends_first


# -- a user's script ----------------------------------------------------------------------------------


def run_script(script: Path, *prefix: str, rank: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RANK": rank, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [interpreter(), *prefix, str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_mistake_in_the_block_is_one_sentence_on_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import deepspeed, torch\n"
        "block = {'direction': {'sketch_size': 1000}}\n"
        "config = {'train_batch_size': 1, 'silent_consistency': block}\n"
        "deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)\n"
    )
    for rank in ("0", "1"):
        done = run_script(script, "-m", "ds_silent", rank=rank)
        said = [line for line in done.stderr.splitlines() if "sketch_size" in line]
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert len(said) == (rank == "0")
    missing = run_script(tmp_path / "missing.py", "-m", "ds_silent")
    assert missing.returncode == 1
    assert "missing.py" in missing.stderr
    assert "Traceback" not in missing.stderr


# -- a callback that closes the observer -----------------------------------------------------------


def close_in_callback(directory: str) -> list[Any]:
    engine = build(Case(), Path(directory) / "on")
    observer, generator = ds_silent.observer_of(engine), torch.Generator().manual_seed(dist.get_rank())
    assert observer is not None
    observer.on_event(lambda event: observer.close())
    for step in range(1, 9):
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                engine.module.frozen.weight[0, 0] += 1.0
        one_step(engine, generator)
    failure = observer._guard.failure
    observer.close()
    return [int(engine.global_steps), None if failure is None else repr(failure)]


def test_a_callback_may_close_the_observer(tmp_path: Path) -> None:
    assert run_on_kept_ranks(close_in_callback, 2, (str(tmp_path),), timeout=60) == [[8, None]] * 2
    kinds = [event["kind"] for event in read_events(tmp_path / "on" / "events.jsonl")]
    assert kinds[0] == "replica-drift"
