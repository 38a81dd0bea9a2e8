"""The trace's file: what was written comes back, and what is torn, foreign or hostile is skipped or refused."""

from __future__ import annotations

import base64
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_silent.trace import (
    Gradient,
    Head,
    Layer,
    Rows,
    Step,
    Tensor,
    TraceError,
    Used,
    Weighed,
    read_trace,
    sampled,
    write_head,
    write_step,
)

HEAD = Head(
    interval=1,
    size=4,
    ranks=2,
    micro_batches=3,
    framework="DistributedDataParallel",
    precision="fp32",
    rounding=1.5e-7,
    layer_size=2,
    layers=(Layer("embed"), Layer("layers.0")),
    tensors=(Tensor("embed.weight", (5, 4), "torch.bfloat16", 0, 16, 0), Tensor("layers.0.bias", (3,), "f", 1, 3)),
    settings={"lr": {"value": 0.1, "from": "yours"}},
    versions={"torch": "2.13.0"},
)
RNG = np.random.default_rng(0)


def gradient() -> Gradient:
    arrays = [RNG.standard_normal(shape, dtype=np.float32) for shape in ((4,), (2,), (2, 2))]
    return Gradient(1.5, *arrays)


def step(number: int, loss: float | None = 2.0, **others: object) -> Step:
    values: dict[str, object] = {
        "step": number,
        "samples": 64 * number,
        "rows": Rows(64, "00ff00ff00ff00ff"),
        "loss": loss,
        "losses": 0.25,
        "objective": Weighed(100.0, 64.0, 0.5, 1.0),
        "rates": (0.1, 0.2),
        "applied": Used(0.5, 1e-8),
        "local": gradient(),
        "reduced": gradient(),
        "weights": RNG.standard_normal(19, dtype=np.float32),
    }
    return Step(**values | others)  # type: ignore[arg-type]


def write(path: Path, *lines: Head | Step | str | bytes) -> Path:
    with open(path, "wb") as file:
        for line in lines:
            if isinstance(line, Head):
                line = write_head(line)
            elif isinstance(line, Step):
                line = write_step(line)
            file.write(line if isinstance(line, bytes) else line.encode() + b"\n")
    return path


def alike(one: Step, other: Step) -> bool:
    def flat(value: Step) -> list[object]:
        found: list[object] = [*vars(replace(value, local=None, reduced=None, weights=None, head=None)).values()]
        for part in (value.local, value.reduced):
            found += [None] if part is None else [part.norm, *(getattr(part, name).tolist() for name in NAMES)]
        return [*found, None if value.weights is None else value.weights.tolist()]

    return flat(one) == flat(other)


NAMES = ("sketch", "layer_norms", "layer_sketches")


def test_what_was_written_comes_back_from_the_file_and_from_the_directory(tmp_path: Path) -> None:
    steps = [step(1), step(2), step(4, rows=None, loss=None, objective=None, applied=None, local=None, weights=None)]
    path = write(tmp_path / "trace.jsonl", HEAD, *steps)
    for trace in (read_trace(path), read_trace(tmp_path), read_trace(str(tmp_path))):
        assert trace.head == HEAD
        assert trace.heads == (HEAD,)
        assert trace.steps == (1, 2, 4)
        assert trace.skipped == 0
        assert 2 in trace
        assert 3 not in trace
        assert len(trace) == 3
        assert all(alike(found, wrote) for found, wrote in zip(trace, steps, strict=True))
        assert trace.at(4).head == HEAD
        reduced = trace.at(1).reduced
        assert reduced is not None
        assert reduced.layer_sketches.shape == (2, 2)


def test_the_line_is_what_the_page_says(tmp_path: Path) -> None:
    head = json.loads(write_head(HEAD))
    assert head["trace"] == 1
    assert head["layers"] == [{"name": "embed"}, {"name": "layers.0"}]
    assert head["tensors"][0] == {
        "name": "embed.weight",
        "shape": [5, 4],
        "dtype": "torch.bfloat16",
        "layer": 0,
        "samples": 16,
        "order": 0,
    }
    assert head["settings"] == {"lr": {"value": 0.1, "from": "yours"}}
    assert head["rounding"] == 1.5e-7
    own = step(1, float("nan"))
    line = json.loads(write_step(own))
    assert line["loss"] == "nan"
    assert line["rows"] == {"count": 64, "hash": "00ff00ff00ff00ff", "by": "content"}
    assert own.weights is not None
    assert struct.unpack("<19f", base64.b64decode(line["weights"])) == tuple(own.weights.tolist())
    assert set(line["local"]) == {"norm", *NAMES}
    assert set(line) == {
        *("step", "samples", "rows", "loss", "losses", "objective", "rates", "applied", "local", "reduced", "weights")
    }


def test_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    own = gradient()
    own = replace(own, norm=float("inf"), sketch=np.array([np.nan, np.inf, -np.inf, -0.0], dtype=np.float32))
    trace = read_trace(write(tmp_path / "trace.jsonl", HEAD, step(1, float("-inf"), local=own)))
    found = trace.at(1)
    assert found.loss == float("-inf")
    assert found.local is not None
    assert found.local.norm == float("inf")
    assert found.local.sketch.tobytes() == own.sketch.tobytes()


def test_sampled_elements_lie_in_the_middles_of_equal_parts() -> None:
    assert sampled(3, 3).tolist() == [0, 1, 2]
    assert sampled(32, 16).tolist() == list(range(1, 32, 2))
    assert sampled(1, 1).tolist() == [0]
    assert sampled(0, 0).tolist() == []
    large = sampled(10**12 + 7, 16)  # floats would round
    assert large.tolist() == [(2 * i + 1) * (10**12 + 7) // 32 for i in range(16)]
    assert len(set(sampled(17, 16).tolist())) == 16


def test_steps_taken_again_retire_what_was_written_of_them_and_later_ones(tmp_path: Path) -> None:
    other = replace(HEAD, ranks=4, size=8, tensors=HEAD.tensors[:1], layers=HEAD.layers[:1])
    again = step(2, 7.0, local=None, reduced=None, weights=np.zeros(16, dtype=np.float32))
    trace = read_trace(write(tmp_path / "trace.jsonl", HEAD, step(1), step(2), step(3), other, again))
    assert trace.steps == (1, 2)
    assert trace.heads == (HEAD, other)
    assert trace.head.ranks == 4
    assert trace.at(2).loss == 7.0
    assert trace.at(2).head == other
    assert trace.at(1).head == HEAD


@pytest.mark.parametrize("torn", [1, 20, 200])
def test_a_torn_tail_is_skipped_and_a_line_torn_by_an_earlier_process_too(tmp_path: Path, torn: int) -> None:
    tail = write_step(step(3)).encode()[:-torn]
    path = write(tmp_path / "trace.jsonl", HEAD, step(1), step(2), tail)
    assert read_trace(path).steps == (1, 2)
    assert read_trace(path).skipped == 1
    path = write(tmp_path / "trace.jsonl", HEAD, step(1), tail + b"\n", HEAD, step(2))
    assert read_trace(path).steps == (1, 2)
    assert read_trace(path).skipped == 1


def test_unknown_keys_of_a_later_version_are_left(tmp_path: Path) -> None:
    head = json.loads(write_head(HEAD)) | {"new": [1], "version": 7}
    line = json.loads(write_step(step(1))) | {"other": {"a": 1}}
    line["local"]["more"] = 3
    trace = read_trace(write(tmp_path / "trace.jsonl", json.dumps(head), json.dumps(line)))
    assert trace.head == HEAD
    assert trace.steps == (1,)


def edited(number: int, **changes: object) -> str:
    return json.dumps(json.loads(write_step(step(number))) | changes)


HOSTILE = {
    "no JSON": "{",
    "no object": "[1]",
    "nested": "[" * 100_000,
    "bytes": b"\xff\xfe\x00\n",
    "no step": edited(5, step=None),
    "a step below 0": edited(5, step=-1),
    "a huge step": edited(5, step=10**30),
    "a step of words": edited(5, step="5"),
    "true for a step": edited(5, step=True),
    "short weights": edited(5, weights="AAAA"),
    "weights of words": edited(5, weights="?" * 104),
    "weights of numbers": edited(5, weights=[1.0]),
    "a gradient of words": edited(5, local="x"),
    "a gradient without arrays": edited(5, local={"norm": 1.0}),
    "rows of words": edited(5, rows="x"),
    "a loss of words": edited(5, loss="x"),
    "rates of words": edited(5, rates={"a": 1}),
    "a whole number beyond floats": '{"step": 5, "loss": 1' + "0" * 400 + "}",
    "too many digits": '{"step": 5, "loss": 1' + "0" * 5000 + "}",
    "a head of words": '{"trace": "x"}',
    "a head without sizes": '{"trace": 1}',
    "a head below 0": json.dumps(json.loads(write_head(HEAD)) | {"size": -4}),
    "a head whose layer is not there": write_head(replace(HEAD, layers=HEAD.layers[:1])),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_line_is_skipped(tmp_path: Path, line: str | bytes) -> None:
    trace = read_trace(write(tmp_path / "trace.jsonl", HEAD, step(1), line, step(2)))
    assert trace.steps == (1, 2)
    assert trace.skipped == 1
    assert trace.heads == (HEAD,)


def test_a_line_too_long_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.trace.reading.LONGEST_LINE", 2048)
    trace = read_trace(write(tmp_path / "trace.jsonl", HEAD, step(1), edited(2, more="x" * 9000), step(3)))
    assert trace.steps == (1, 3)
    assert trace.skipped == 1
    assert trace.at(3).step == 3


def test_what_is_no_trace_is_refused_with_one_sentence(tmp_path: Path) -> None:
    empty, foreign, newer, both = (tmp_path / name for name in ("empty", "foreign", "newer", "both"))
    empty.write_bytes(b"")
    foreign.write_text('{"step": 1}\n')
    newer.write_text('{"trace": 2, "what": "ever"}\n')
    (both / "tp0").mkdir(parents=True)
    write(both / "tp0" / "trace.jsonl", HEAD)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "pipe")
    name = "name a run's directory or its trace.jsonl"
    for path, sentence in {
        empty: f"{str(empty)!a} is empty: it has no head; {name}",
        foreign: f"{str(foreign)!a} is no trace: it has no head; {name}",
        newer: f"{str(newer)!a} is a trace of version 2, and this ds_silent reads version 1; install a newer ds_silent",
        both: f"{str(both)!a} holds the traces of several groups ('tp0'); name one of them",
        tmp_path / "run": f"{str(tmp_path / 'run')!a} holds no trace.jsonl; "
        'add "trace": {} to the block of that training and run it again',
        tmp_path / "none": f"{str(tmp_path / 'none')!a} does not exist; {name}",
        tmp_path / "pipe": f"{str(tmp_path / 'pipe')!a} is no file; {name}",
        Path("a\0b"): f"'a\\x00b' does not exist; {name}",
    }.items():
        with pytest.raises(TraceError) as refused:
            read_trace(path)
        assert str(refused.value) == sentence


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", HEAD, step(1), step(2))
    trace = read_trace(path)
    with pytest.raises(TraceError, match="holds no step 3; its steps are 1 to 2"):
        trace.at(3)
    write(path, HEAD)
    with pytest.raises(TraceError, match="was changed while it was read"):
        trace.at(2)
    path.unlink()
    with pytest.raises(TraceError, match=r"cannot be read \(No such file or directory\)"):
        trace.at(2)
