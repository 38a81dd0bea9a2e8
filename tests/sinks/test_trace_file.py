"""A line waits for what the next step tells of it, and is on the disk when it has to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_silent.sinks.jsonl import TraceSink
from ds_silent.trace import (
    Gradient,
    Head,
    Layer,
    Rows,
    Step,
    Tensor,
    Traced,
    Used,
    Weighed,
    layer_size,
    line_bytes,
    read_trace,
    sample_counts,
    write_step,
)
from tests.sinks.example_records import empty_record

HEAD = Head(1, 2, 1, 1, "torch", "fp32", None, 64, (), ())
USED = Used(0.5, 1e-8)


def step(number: int, head: Head = HEAD) -> Step:
    return Step(number, number, None, 1.0, 0.0, None, (0.1,), None, None, None, None, head)


def write(sink: TraceSink, number: int, of: int | None = None, used: Used | None = None, due: bool = True) -> None:
    sink.write(replace(empty_record(number), traced=Traced(step(number) if due else None, of, used)))


def lines(directory: Path) -> list[str]:
    path = directory / "trace.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_line_is_written_with_what_the_optimizer_used_as_the_next_step_tells_it(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path)
    write(sink, 1)
    assert lines(tmp_path) == []
    write(sink, 2, of=1, used=USED)
    assert len(lines(tmp_path)) == 2  # a head, and the first step
    write(sink, 3, of=2)  # nothing was told
    write(sink, 4, of=2, used=USED)  # of another step
    sink.close()
    trace = read_trace(tmp_path)
    assert [(one.step, one.applied) for one in trace] == [(1, USED), (2, None), (3, None), (4, None)]
    assert len(lines(tmp_path)) == 5


def test_what_is_flushed_is_written_and_once_more_when_it_is_complete(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path)
    write(sink, 1)
    sink.flush()
    sink.flush()
    assert [(one.step, one.applied) for one in read_trace(tmp_path)] == [(1, None)]
    write(sink, 2, of=1, used=USED)
    sink.flush()
    write(sink, 3, of=2)
    assert len(lines(tmp_path)) == 4  # head, 1, 1 again, 2, which stays as it is
    sink.close()
    assert [(one.step, one.applied) for one in read_trace(tmp_path)] == [(1, USED), (2, None), (3, None)]


def test_measured_steps_that_are_not_traced_tell_of_those_that_are(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path)
    write(sink, 2)
    write(sink, 3, of=2, used=USED, due=False)
    write(sink, 4, of=3, used=Used(9.0, 0.0))
    sink.write(empty_record(5))  # of a training without a trace
    sink.close()
    assert [(one.step, one.applied) for one in read_trace(tmp_path)] == [(2, USED), (4, None)]


def test_another_head_gets_a_line(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path)
    write(sink, 1)
    sink.write(replace(empty_record(2), traced=Traced(step(2, replace(HEAD, ranks=2)), 1, None)))
    sink.close()
    sink = TraceSink(tmp_path)
    write(sink, 2)
    sink.close()
    assert [one.ranks for one in read_trace(tmp_path).heads] == [1, 2, 1]


def test_without_a_trace_there_is_no_file(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path)
    sink.write(empty_record(1))
    sink.flush()
    sink.close()
    assert not list(tmp_path.iterdir())


# -- how long a line is ------------------------------------------------------------------------------------------------

SHAPES = {  # layers, and trainable tensors
    "Llama, 20.9 M": (8 + 2, 106),
    "TinyLlama, 1.1 B": (22 + 3, 22 * 9 + 3),
    "Qwen2.5 1.5 B, with biases": (28 + 3, 28 * 12 + 3),
    "GPT-2 XL, 1.6 B": (48 + 3, 48 * 12 + 4),
    "OLMoE, 1 B active of 7 B": (16 + 3, 16 * (11 + 3 * 64) + 3),
    "a layer of each module": (300, 600),
    "a thousand layers": (1000, 1000),
}


@pytest.mark.parametrize(("layers", "tensors"), SHAPES.values(), ids=SHAPES.keys())
def test_a_step_of_a_billion_parameters_takes_at_most_64_kb(layers: int, tensors: int) -> None:
    numbers = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)
    samples = sum(sample_counts([1 << 20] * tensors))
    small = layer_size(layers)
    gradient = Gradient(
        1.2345678901234567, numbers[:256], numbers[:layers], numbers[: layers * small].reshape(layers, small)
    )
    line = Step(
        step=1_000_000,
        samples=512_000_000,
        rows=Rows(512, "0123456789abcdef"),
        loss=2.1234567890123456,
        losses=0.012345678901234567,
        objective=Weighed(1_048_576, 1.0000001234567, 9.5367431640625e-07, 9.5367431640625e-07),
        rates=(0.000123456789012345,) * 4,
        applied=Used(0.12345678901234567, 1.2345678901234567e-08),
        local=gradient,
        reduced=gradient,
        weights=numbers[:samples],
    )
    length = len(write_step(line))
    assert length <= line_bytes(256, layers, samples) <= length + 200
    assert length <= 64_000
    head = Head(
        *(1, 256, 8, 4, "torch", "bf16", 1e-7, small),
        layers=tuple(Layer(f"model.layers.{place}") for place in range(layers)),
        tensors=tuple(Tensor(f"t{place}", (1024, 1024), "float32", 0, 16) for place in range(tensors)),
    )
    assert head.part(1) == slice(16, 32)
