"""Where the records go: JSON lines, TensorBoard and the console by a thread, and DeepSpeed's own monitor.

sinks = open_files("runs/my-run", tensorboard=True)  # on rank 0; ds_silent.observing.records_directory opens all
"""

from __future__ import annotations

from pathlib import Path

from ds_silent.sinks.base import FanOut, Sink, SinkError
from ds_silent.sinks.jsonl import JsonlSink, TraceSink
from ds_silent.sinks.per_rank import PerRankSink
from ds_silent.sinks.run_directory import FactsSink
from ds_silent.sinks.tensorboard import TensorBoardSink
from ds_silent.sinks.worker import Background

__all__ = ["Background", "FanOut", "Sink", "SinkError", "open_files"]


def open_files(
    directory: str | Path, tensorboard: bool, *, trace: bool = False, resume_step: int | None = None
) -> FanOut:
    """Open the sinks that write below ``directory``.

    Args:
        trace: whether steps are traced.
        resume_step: the last step of the checkpoint; None: not known, the first record says where the run goes on.

    Raises:
        SinkError: one of them cannot be opened; nothing is left open.
    """
    opened: list[Sink] = []
    try:
        opened += [sink(directory) for sink in (JsonlSink, PerRankSink, FactsSink)]
        opened += [TraceSink(directory)] if trace else []
        if tensorboard:
            opened.append(TensorBoardSink(Path(directory) / "tensorboard", resume_step=resume_step))
    except SinkError:
        FanOut(opened).close()
        raise
    return FanOut(opened)
