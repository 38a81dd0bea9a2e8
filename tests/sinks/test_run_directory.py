"""The records of one engine and one run stay its own: two engines, two runs, two processes in one ``output_dir``."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.config import parse
from ds_silent.observing import records_directory
from ds_silent.observing.records_directory import RunDirectory
from ds_silent.sinks import run_directory
from ds_silent.sinks.jsonl import read_metrics
from tests.support.distributed import run_distributed
from tests.support.training import Case, Probe, build, one_step


@contextmanager
def told() -> Iterator[list[str]]:
    """What the observer says on the console, as sentences."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_silent").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("ds_silent").removeHandler(handler)


def trained(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        one_step(engine, generator)


def observer_of(engine: Any) -> ds_silent.Observer:
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    return observer


def saved(engine: Any, directory: Path, tag: str, with_state: bool) -> None:
    state = {"observer": observer_of(engine).state_dict()} if with_state else {}
    engine.save_checkpoint(str(directory), tag=tag, client_state=state)


def resumed(case: Case, output: Path, checkpoints: Path, tag: str, steps: int) -> str:
    """A new engine that loads the checkpoint, and trains on; where it has written."""
    engine = build(case, output)
    observer = observer_of(engine)
    path, state = engine.load_checkpoint(str(checkpoints), tag=tag)
    assert path is not None
    if "observer" in state:
        observer.load_state_dict(state["observer"])
    trained(engine, steps)
    where = observer.output_dir
    observer.close()
    engine.destroy()
    return where


def steps_in(directory: Path) -> list[int]:
    """As they were written: a reader would hide what was mixed."""
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


# -- one run after the other -------------------------------------------------------------------------


def run_anew(case: Case, output: Path, checkpoints: Path, tags: dict[int, str], steps: int, with_state: bool) -> str:
    engine, generator = build(case, output), torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, steps + 1):
        for _ in range(case.accumulation):
            one_step(engine, generator)
        if step in tags:
            saved(engine, checkpoints, tags[step], with_state)
    where = observer_of(engine).output_dir
    observer_of(engine).close()  # as a process does that ends
    engine.destroy()
    return where


def several_runs(directory: str) -> dict[bool, list[str]]:
    """Where each of several runs into one directory has written, as this rank knows it."""
    places = {}
    for with_state in (True, False):
        root, case = Path(directory) / str(with_state), Case(stage=1)
        output, other, checkpoints = root / "out", root / "other", root / "checkpoints"
        with told() as said:
            where = [
                run_anew(case, output, checkpoints, {4: "first"}, 4, with_state),
                run_anew(case, output, checkpoints, {2: "early", 6: "second"}, 6, with_state),  # no checkpoint loaded
                resumed(case, output, checkpoints, "second", 1),
            ]
            if with_state:  # step 4 was reached by both runs: only the observer's state tells which one it was
                where.append(resumed(case, output, checkpoints, "first", 2))
            where.append(run_anew(case, output, checkpoints, {}, 1, with_state))
            # another training's records, of more steps than the checkpoint has
            where.append(run_anew(Case(stage=1, accumulation=2), other, checkpoints, {}, 7, with_state))
            where.append(resumed(case, other, checkpoints, "early", 1))
        sentences = [line for line in said if "are in" in line or "go on after" in line]
        assert len(sentences) == (len(where) - 2 if dist.get_rank() == 0 else 0), said
        places[with_state] = [str(Path(one).relative_to(root)) for one in where]
    return places


def killed(directory: str) -> None:
    """A checkpoint after step 2; rank 0 is killed in step 5, rank 1 with it."""
    root = Path(directory)
    engine = build(Case(stage=1), root / "out")
    trained(engine, 2)
    saved(engine, root / "checkpoints", "two", with_state=True)
    trained(engine, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def restarted(directory: str) -> list[str]:
    root, case = Path(directory), Case(stage=1)
    where = [resumed(case, root / "out", root / "checkpoints", "two", 3)]
    where.append(run_anew(case, root / "out", root / "checkpoints", {}, 1, with_state=False))
    return [str(Path(one).relative_to(root)) for one in where]


# -- several engines at the same time ----------------------------------------------------------------


def several_engines(directory: str) -> list[Any]:
    root, case = Path(directory), Case(stage=1)
    with told() as said:
        actor = build(case, root if dist.get_rank() == 0 else root / "unheard-of")  # rank 0's is what counts
        critic, idle = (build(case, root) for _ in range(2))
        model = Probe(None)
        config = case.config(root, enabled=True)
        del config["optimizer"]
        config["zero_optimization"] = {"stage": 0}
        config["bf16"] = {"enabled": True}
        teacher, *_ = ds_silent.initialize(model=model, config=config)
        fourth = build(case, root)
    for engine, steps in ((critic, 3), (actor, 2), (fourth, 1)):
        trained(engine, steps)
    where = [observer_of(engine).output_dir for engine in (actor, critic, idle, fourth)]
    observed = ds_silent.observer_of(teacher) is not None
    for engine in (actor, critic, idle, fourth):
        observer_of(engine).close()
    return [[str(Path(one).relative_to(root)) for one in where], observed, said]


def in_one_start(directory: str) -> tuple[dict[bool, list[str]], list[str], list[Any]]:
    root = Path(directory)
    restart = restarted(str(root / "killed"))
    return several_runs(str(root / "runs")), restart, several_engines(str(root / "engines"))


class Done(NamedTuple):
    """What both ranks have returned, and where they wrote."""

    root: Path
    ranks: list[Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("runs")
    run_distributed(killed, 2, (str(root / "killed"),), may_die=(0, 1), timeout=200)
    with open(root / "killed" / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "tor')
    return Done(root, run_distributed(in_one_start, 2, (str(root),), timeout=280))


@pytest.mark.long
def test_a_used_directory_goes_on_only_as_a_resume_of_its_own_run(done: Done) -> None:
    for places, _, _ in done.ranks:
        assert places[True] == ["out", "out/run-2", "out/run-2", "out", "out/run-3", "other", "other/run-2"]
        assert places[False] == ["out", "out/run-2", "out/run-2", "out/run-3", "other", "other/run-2"]
    with_state, without = done.root / "runs" / "True", done.root / "runs" / "False"
    assert steps_in(with_state / "out") == [1, 2, 3, 4, 5, 6]
    assert steps_in(without / "out") == [1, 2, 3, 4]
    for root in (with_state, without):
        assert steps_in(root / "out" / "run-2") == [1, 2, 3, 4, 5, 6, 7]
        assert steps_in(root / "out" / "run-3") == [1]
        assert steps_in(root / "other") == [1, 2, 3, 4, 5, 6, 7]
        assert steps_in(root / "other" / "run-2") == [3]
        at_start = {"preflight.json", "ranks.json", "run.json"}
        fresh = {"metrics.jsonl", "events.jsonl", "matrices.jsonl", "scores.jsonl", *at_start}
        assert {path.name for path in (root / "other").iterdir()} == {*fresh, "run-2"}
        earlier = {name.replace(".", "-1.") for name in at_start}
        assert {path.name for path in (root / "out" / "run-2").iterdir()} == fresh | earlier


def test_a_killed_run_goes_on_from_its_checkpoint_and_a_new_one_does_not(done: Done) -> None:
    root = done.root / "killed"
    assert [where for _, where, _ in done.ranks] == [["out", "out/run-2"]] * 2
    records = read_metrics(root / "out" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["samples"] for r in records] == [6, 12, 18, 24, 30]
    assert steps_in(root / "out" / "run-2") == [1]


def test_where_the_records_of_a_second_run_go_is_said_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"silent_consistency": {"output_dir": "runs/a"}})
    assert config is not None
    home = RunDirectory(config, None, torch.device("cpu"))  # type: ignore[arg-type]
    assert home.says() == "runs/a"
    home._undecided = True
    assert home.says() == (
        "a new directory below runs/a, which holds an earlier run; they go on in runs/a itself only if that run's "
        "checkpoint is loaded before the first step, with the observer's state in it"
    )
    monkeypatch.setattr(records_directory, "_written", {"runs/a"})
    assert "which holds what this process has written before;" in home.says()


def test_each_engine_of_a_process_has_a_directory_of_its_own(done: Done) -> None:
    root, (first, second) = done.root / "engines", (engines for _, _, engines in done.ranks)
    assert first[:2] == second[:2] == [[".", "engine-2", "engine-3", "engine-4"], False]
    assert steps_in(root) == [1, 2]
    assert steps_in(root / "engine-2") == [1, 2, 3]
    assert steps_in(root / "engine-4") == [1]
    at_start = ["preflight.json", "ranks.json", "run.json"]  # no step
    assert sorted(path.name for path in (root / "engine-3").iterdir()) == at_start
    said = [line for line in first[2] if "observing" in line or "not observed" in line]
    assert [line.rpartition(str(root))[2] for line in said[:3]] == ["", "/engine-2", "/engine-3"]
    assert "without an optimizer" in said[3]


# -- other processes ---------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from ds_silent.sinks.run_directory import claim_unused
sys.stdin.readline()
claim = claim_unused(Path(sys.argv[1]))
print(claim.number, flush=True)
sys.stdin.readline()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def beside_another(directory: str) -> tuple[str, list[str]]:
    with told() as said:
        engine = build(Case(), Path(directory))
        trained(engine, 2)
    where = observer_of(engine).output_dir
    observer_of(engine).close()
    return where, said


def test_two_processes_at_the_same_time_never_share_a_directory(tmp_path: Path) -> None:
    others = [holder(tmp_path / "many") for _ in range(4)] + [holder(tmp_path / "one")]
    try:
        for process in others:
            go(process)
        numbers = sorted(int(process.stdout.readline()) for process in others[:4] if process.stdout is not None)
        assert numbers == [1, 2, 3, 4]
        assert others[4].stdout is not None
        assert others[4].stdout.readline() == "1\n"
        ranks = run_distributed(beside_another, 2, (str(tmp_path / "one"),), timeout=200)
        assert [where for where, _ in ranks] == [str(tmp_path / "one" / "run-2")] * 2
        assert any("another process" in line for line in ranks[0][1])
        assert steps_in(tmp_path / "one" / "run-2") == [1, 2]
        assert steps_in(tmp_path / "one") == []
        others[4].kill()  # what it held is free again, and nothing stands there
        others[4].wait()
        claim = run_directory.claim_unused(tmp_path / "one")
        assert claim is not None
        assert claim.number == 1
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_a_child_that_outlives_the_training_holds_nothing(tmp_path: Path) -> None:
    claim = run_directory.claim_unused(tmp_path)
    assert claim is not None
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert run_directory.claim_unused(tmp_path, first_only=True) is None
        os.close(claim._lock)  # as the end of this process would: no explicit unlock
        again = run_directory.claim_unused(tmp_path, first_only=True)
        assert again is not None
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        claim._release.detach()


def test_without_locks_the_creation_of_the_file_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuses)
    kept = [run_directory.claim_unused(tmp_path) for _ in range(3)]
    assert [claim.number for claim in kept if claim is not None] == [1, 2, 3]
    again = run_directory.claim_used(tmp_path, 2)
    assert again is not None  # a resume may go on


# -- which records are a checkpoint's -----------------------------------------------------------------


def record(step: int, samples: int) -> str:
    return json.dumps({"step": step, "samples": samples, "padding": "x" * 300}) + "\n"


@pytest.mark.parametrize(
    ("step", "samples", "interval", "holds"),
    [
        (9, 54, 1, True),
        (9, 55, 1, False),  # another batch size
        (500, 3000, 1, True),
        (501, 3006, 1, False),  # never got there
        (505, 3030, 10, True),  # the next record was due at 510
        (510, 3060, 10, False),
        (505, 2999, 10, False),
    ],
)
def test_a_checkpoint_without_the_observers_state(
    step: int, samples: int, interval: int, holds: bool, tmp_path: Path
) -> None:
    lines = [record(step, 6 * step) for step in range(1, 501)]
    lines[3] = "torn" + lines[3]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 501, "sam')
    assert run_directory.holds_step(tmp_path, step, samples, interval) is holds


def test_after_a_resume_the_last_written_counts(tmp_path: Path) -> None:
    lines = [record(step, 6 * step) for step in range(1, 9)] + [record(5, 99), record(6, 105)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert run_directory.holds_step(tmp_path, 6, 105, 1)
    assert not run_directory.holds_step(tmp_path, 6, 36, 1)
    assert run_directory.holds_step(tmp_path, 4, 24, 1)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    first = run_directory.identity(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    assert run_directory.identity(tmp_path) == first is not None
    (tmp_path / "metrics.jsonl").write_text("".join(lines[1:]))
    assert run_directory.identity(tmp_path) != first
