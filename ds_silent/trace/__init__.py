"""``trace.jsonl``: what one training was at each step, in numbers that do not depend on how many ranks made it.

    trace = read_trace("runs/my-run")        # a run's directory, or the file; TraceError: one sentence
    trace.head.layers, trace.steps           # of the run that went on last; the numbers of its steps
    step = trace.at(12)                      # read and decoded only now
    step.loss, step.reduced.sketch, step.weights

Lines of JSON: a :class:`Head`, then a :class:`Step` after the other, and one more head wherever the run started again.
A step retires what was written before of the same and of later steps, as in ``metrics.jsonl``. Arrays are base64 of
little-endian fp32. ``docs/trace.md`` says what each number means.
"""

from __future__ import annotations

from ds_silent.trace.form import (
    NAME,
    SAMPLES,
    VERSION,
    Floats,
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
    sample_counts,
    sampled,
    write_head,
    write_step,
)
from ds_silent.trace.reading import Trace, TraceError, read_trace

__all__ = [
    "NAME", "SAMPLES", "VERSION", "Floats", "Gradient", "Head", "Layer", "Rows", "Step", "Tensor", "Trace",
    "TraceError", "Traced", "Used", "Weighed", "layer_size", "line_bytes", "read_trace", "sample_counts", "sampled",
    "write_head", "write_step",
]  # fmt: skip
