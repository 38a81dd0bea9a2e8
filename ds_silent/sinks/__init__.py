"""Where the records go: JSON lines, TensorBoard, the console, DeepSpeed's own monitor.

sinks = open_sinks(config, monitor_write=engine.monitor.write_events)    # on rank 0 only
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_silent.sinks.base import FanOut, Sink, SinkError
from ds_silent.sinks.console import ConsoleSink
from ds_silent.sinks.jsonl import JsonlSink
from ds_silent.sinks.monitor import MonitorSink, MonitorWrite

if TYPE_CHECKING:  # the configuration imports DeepSpeed, and who only reads records should not wait for that
    from ds_silent.config import SilentConsistencyConfig

__all__ = ["FanOut", "Sink", "SinkError", "open_sinks"]


def open_sinks(
    config: SilentConsistencyConfig,
    *,
    monitor_write: MonitorWrite | None = None,
    resume_step: int | None = None,
    console_every: int = 10,
) -> FanOut:
    """The sinks that ``config`` asks for, opened. Call it on rank 0 only.

    Args:
        config: the checked block.
        monitor_write: DeepSpeed's ``engine.monitor.write_events`` where the user configured a monitor.
        resume_step: the last step that the checkpoint holds, or ``None`` when it is not known (a new run, or the
            checkpoint is loaded later); then the first record written says where the run goes on.
        console_every: measured records per console line; 0 writes events only.

    Raises:
        SinkError: ``output_dir`` cannot be written, or TensorBoard is asked for and not installed; nothing is left
            open. The caller tells the other ranks, so that all refuse to start together.
    """
    opened: list[Sink] = []
    try:
        opened.append(JsonlSink(config.output_dir))
        if config.tensorboard:
            # Importing it costs a second and needs an optional package, so only who wants it pays.
            from ds_silent.sinks.tensorboard import TensorBoardSink

            opened.append(TensorBoardSink(Path(config.output_dir) / "tensorboard", resume_step=resume_step))
        opened.append(ConsoleSink(every=console_every))
        if monitor_write is not None:
            opened.append(MonitorSink(monitor_write))
    except SinkError:
        FanOut(opened).close()
        raise
    return FanOut(opened)
