"""Where the records go: JSON lines, TensorBoard and the console by a thread, and DeepSpeed's own monitor.

sinks = open_sinks(config, monitor_write=engine.monitor.write_events)    # on rank 0 only
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_silent.sinks.background import Background
from ds_silent.sinks.base import FanOut, Sink, SinkError
from ds_silent.sinks.console import ConsoleSink
from ds_silent.sinks.jsonl import JsonlSink
from ds_silent.sinks.monitor import MonitorSink, MonitorWrite
from ds_silent.sinks.per_rank import PerRankSink
from ds_silent.sinks.run_facts import FactsSink

if TYPE_CHECKING:  # who only reads records should not wait for the configuration's imports
    from ds_silent.config import SilentConsistencyConfig

__all__ = ["Background", "FanOut", "Sink", "SinkError", "open_files", "open_sinks"]


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
    files = open_files(config.output_dir, config.tensorboard, resume_step=resume_step)
    monitor = [] if monitor_write is None else [MonitorSink(monitor_write)]
    alerts: list[Sink] = []
    if config.alerts:
        from ds_silent.alerts.sink import open_alerts  # it imports the configuration

        alerts.append(open_alerts(config.alerts, lambda: config.output_dir, monitor_write=monitor_write))
    console = ConsoleSink(every=console_every, ends=True)
    console.directory = config.output_dir
    return FanOut([Background([*files.sinks, console]), *alerts, *monitor])


def open_files(directory: str | Path, tensorboard: bool, *, resume_step: int | None = None) -> FanOut:
    """The sinks that write below ``directory``, opened; see :func:`open_sinks`.

    Raises:
        SinkError: one of them cannot be opened; nothing is left open.
    """
    opened: list[Sink] = []
    try:
        opened.append(JsonlSink(directory))
        opened.append(PerRankSink(directory))
        opened.append(FactsSink(directory))
        if tensorboard:
            # Importing it costs a second and needs an optional package, so only who wants it pays.
            from ds_silent.sinks.tensorboard import TensorBoardSink

            opened.append(TensorBoardSink(Path(directory) / "tensorboard", resume_step=resume_step))
    except SinkError:
        FanOut(opened).close()
        raise
    return FanOut(opened)
