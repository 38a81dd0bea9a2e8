"""Where the records of one engine go: agreed by all ranks, and never a directory that holds those of another.

    home = RunDirectory.open(config, group, device, monitor_write)      # a collective
    home.settle(done=12, samples=768, records=None, collective=unguarded)       # a collective, at the first step
    home.directory                                                      # on every rank

The first engine of a process writes to ``output_dir``, the second to ``output_dir/engine-2``. A directory that holds
no records is taken at once. Whether records that are there already go on is not known before the first step: a
checkpoint may be loaded until then. What is to be written waits; then a resume goes on in the directory of its records
and anything else takes ``run-2``, ``run-3`` ... below it. :mod:`ds_silent.sinks.run_directory` locks one directory and
writes its ``run.json``.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_silent.alerts.sink import Alerts
from ds_silent.config import SilentConsistencyConfig
from ds_silent.config.destination import WrongDestination
from ds_silent.distributed.guard import CollectiveCall
from ds_silent.runs.summary import RunSummary
from ds_silent.sinks import Background, FanOut, Sink, SinkError, open_files
from ds_silent.sinks.console import ConsoleSink
from ds_silent.sinks.run_directory import (
    Claim,
    claim_unused,
    claim_used,
    end_of,
    holds_step,
    identity,
    is_used,
    run_directory,
    runs_of,
    write_end,
)
from ds_silent.sinks.scalars import MonitorSink, MonitorWrite

logger = logging.getLogger("ds_silent")
LONGEST = 4096
"""Bytes of a path, on Linux."""
_live: weakref.WeakSet[RunDirectory] = weakref.WeakSet()  # of this process; two engines must not share a directory
_written: set[str] = set()  # by this process, now or before


class RunDirectory:
    """One engine's directory; the files and the claim on it are on the writing rank only.

    Attributes:
        directory: where the writing rank writes; while undecided, where it would have to go on.
        sinks: on the writing rank, everything that takes records; None elsewhere.
        processes: on the writing rank, those of the ranks on its host, by rank.
    """

    def __init__(self, config: SilentConsistencyConfig, group: dist.ProcessGroup, device: torch.device):
        self.directory = config.output_dir
        self.sinks: FanOut | None = None
        self.processes: Mapping[int, Any] = {}
        self._config, self._group, self._device = config, group, device
        self._base = Path(config.output_dir)
        self._engine = 1
        self._undecided = False
        self._background: Background | None = None  # writes everything but what the monitor gets
        self._summary: RunSummary | None = None
        self._claim: Claim | None = None
        self._files: dict[str, str] = {}  # by name, that wait for the directory
        self._stepped = False
        self._end = end_of(0, None)

    @classmethod
    def open(
        cls,
        config: SilentConsistencyConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        monitor_write: MonitorWrite | None = None,
    ) -> RunDirectory:
        """A collective: rank 0 looks, and all ranks know its answer.

        Raises:
            SinkError: ``output_dir`` cannot be written; on every rank.
        """
        home, refusal = cls(config, group, device), None
        if dist.get_rank(group) == 0:
            home._engine = _free_number(config.output_dir)
            try:
                home._take(monitor_write)
            except SinkError as error:
                refusal = error
                if home._background is not None:
                    home._background.close()  # nobody will: a port that it serves must be free again
        refused, home._engine, undecided = home._agree(int(refusal is not None), home._engine, int(home._undecided))
        if refused:
            raise refusal or SinkError(f"rank 0 cannot write to silent_consistency.output_dir {home.directory}")
        home._undecided = bool(undecided)
        _live.add(home)
        return home

    def _take(self, monitor_write: MonitorWrite | None) -> None:
        """On the writing rank: the directory if it is unused, and whatever can be refused now."""
        self._base = Path(self._config.output_dir)
        if self._engine > 1:
            self._base /= f"engine-{self._engine}"
        self.directory = str(self._base)
        _refuse_without_tensorboard(self._config)
        label = None if self._engine == 1 else f"engine-{self._engine}"
        self._summary = RunSummary(label)
        served = _prometheus_sinks(self._config, lambda: self.directory)
        self._background = Background([ConsoleSink(label=label), self._summary, *served], more=True)
        claim = claim_unused(self._base, first_only=True)
        self._undecided = claim is None
        if claim is not None:
            self._write_into(claim, None)
        monitor = [] if monitor_write is None else [MonitorSink(monitor_write, label)]
        # Not among what the thread writes: a disk that hangs is no reason to tell nobody.
        self.sinks = FanOut(
            [self._background, *_alert_sinks(self._config, lambda: self.directory, monitor_write), *monitor]
        )

    def says(self) -> str:
        """For the console, at the start."""
        if not self._undecided:
            return self.directory
        held = "what this process has written before" if self.directory in _written else "an earlier run"
        return (
            f"a new directory below {self.directory}, which holds {held}; they go on in {self.directory} "
            "itself only if that run's checkpoint is loaded before the first step, with the observer's state in it"
        )

    def settle(self, done: int, samples: int, records: str | None, collective: CollectiveCall) -> None:
        """Decide, if that is still open. A collective then; the guard of all ranks runs it before the first step.

        Args:
            done: optimizer steps behind the engine, 0 for a new training.
            samples: rows behind it, over all ranks.
            records: the :meth:`identity` in the checkpoint, if an observer's state came with it.
            collective: see :mod:`ds_silent.distributed.guard`.
        """
        self._stepped = True
        if not collective(lambda: self._undecided):
            return
        if self._background is not None and self._claim is None:
            try:
                self._decide(done, samples, records)
            except Exception as error:  # the others wait for the answer
                self._background.add(())
                logger.warning("ds_silent: this run's records are not written, the training goes on: %s", error)
        collective(self._agree)
        self._undecided = False

    def _decide(self, done: int, samples: int, records: str | None) -> None:
        """On the writing rank: the directory of the run that goes on, or a new one."""
        runs = ((n, run_directory(self._base, n)) for n in reversed(runs_of(self._base)))
        found = next((n for n, place in runs if _goes_on(place, done, samples, records, self._config.interval)), None)
        claim = None if found is None else claim_used(self._base, found)
        if claim is not None:
            logger.warning("ds_silent: the records in %s go on after step %d", claim.directory, done)
        else:
            claim = claim_unused(self._base)
            assert claim is not None
            if found is not None or not is_used(self._base):
                held = run_directory(self._base, found or 1)
                why = f"another process is writing to {held}"
            elif done or records:
                why = f"{self._base} holds the records of other runs than the one that this checkpoint is from"
            else:
                why = f"{self._base} holds the records of another run"
            logger.warning("ds_silent: %s, so the records of this one are in %s", why, claim.directory)
        self._write_into(claim, done)

    def _write_into(self, claim: Claim, done: int | None) -> None:
        assert self._background is not None
        assert self._summary is not None
        try:
            traces = self._config.trace is not None
            files = open_files(claim.directory, self._config.tensorboard, trace=traces, resume_step=done or None)
        except SinkError:
            claim.release()
            raise
        self._claim = claim
        self.directory = self._summary.directory = str(claim.directory)
        _written.add(self.directory)
        self._summary.files = files.sinks
        self._background.add(files.sinks)
        self._background.drain()  # what has waited comes before these files, which look at it
        for name, text in self._files.items():
            self.write_file(name, text)

    def write_file(self, name: str, text: str) -> None:
        """A file that is written at the start, as ``preflight.json`` is; that of an earlier start of the same run stays
        as ``preflight-1.json`` and so on."""
        if self._claim is None:
            self._files[name] = text
            return
        path = self._claim.directory / name
        try:
            if path.exists() and is_used(self._claim.directory):
                kept = sum(1 for _ in self._claim.directory.glob(f"{path.stem}-*.json"))
                path.rename(path.with_name(f"{path.stem}-{kept + 1}.json"))
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("ds_silent: %s could not be written: %s", name, error)

    def identity(self) -> str | None:
        """For a checkpoint: which records a training that resumes from it continues; on the writing rank."""
        if self._claim is None or self._background is None:
            return None
        self._background.drain()
        return identity(self._claim.directory)

    def ends(self, step: int, error: BaseException | None) -> None:
        """Keep the last step, and what has ended the training, if something did: for the last line and ``run.json``."""
        self._end = end_of(step, error, self.processes)
        if self._summary is not None:
            self._summary.ended = self._end

    def close(self) -> None:
        """Others may write here; an engine that never stepped leaves no empty records. No collective."""
        _live.discard(self)
        if self._claim is None:
            return
        write_end(self._claim.directory, self._end)
        if not self._stepped and not is_used(self._claim.directory):
            _remove_empty(self._claim.directory)
        self._claim.release()

    def _agree(self, *numbers: int) -> list[int]:
        """Rank 0's numbers, and its directory, whatever this rank's own configuration says. A collective."""
        answer = torch.zeros(LONGEST + len(numbers), dtype=torch.int32)
        if dist.get_rank(self._group) == 0:
            name = os.fsencode(self.directory)[:LONGEST]
            answer[: len(name)] = torch.tensor(list(name), dtype=torch.int32)
            answer[LONGEST:] = torch.tensor(numbers, dtype=torch.int32)
        answer = answer.to(self._device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        self.directory = os.fsdecode(bytes(answer[:LONGEST].tolist()).rstrip(b"\0"))
        return [int(number) for number in answer[LONGEST:].tolist()]


def _goes_on(directory: Path, done: int, samples: int, records: str | None, interval: int) -> bool:
    """Tell whether the training that starts is the one recorded there."""
    if records is not None:
        return identity(directory) == records
    return done > 0 and holds_step(directory, done, samples, interval)


def _refuse_without_tensorboard(config: SilentConsistencyConfig) -> None:
    if config.tensorboard:
        from ds_silent.sinks.tensorboard import summary_writer_type  # slow: only who wants it pays

        summary_writer_type()


def _prometheus_sinks(config: SilentConsistencyConfig, run: Callable[[], str]) -> list[Sink]:
    """Return none where no metrics are wanted, or where the port is taken, as by another engine of this process."""
    if not config.metrics_port:
        return []
    from ds_silent.sinks.prometheus import open_prometheus  # an optional package: only who wants it needs it

    sink = open_prometheus(config.metrics_port, config.metrics_address, run)
    return [] if sink is None else [sink]


def _alert_sinks(
    config: SilentConsistencyConfig, run: Callable[[], str], monitor_write: MonitorWrite | None
) -> list[Sink]:
    """Return none where no alerts are wanted. What cannot be reached was refused before, unless it has just changed."""
    try:
        return [Alerts(config.alerts, run, monitor_write=monitor_write)] if config.alerts else []
    except WrongDestination as error:
        logger.warning("ds_silent: nobody is alerted: an alert %s", error)
        return []


def _free_number(directory: str) -> int:
    """Return the number of an engine, from 1, among those of this process that write to the same directory."""
    place = os.path.realpath(directory)
    taken = {home._engine for home in _live if os.path.realpath(home._config.output_dir) == place}
    return next(number for number in range(1, len(taken) + 2) if number not in taken)


def _remove_empty(directory: Path) -> None:
    """Files without a byte, and the directories that are empty then, but for one that may be the user's own."""
    try:
        for name in ("metrics.jsonl", "events.jsonl"):
            path = directory / name
            if path.is_file() and not path.stat().st_size:
                path.unlink()
        (directory / "tensorboard").rmdir()
    except OSError:  # not empty, or never made
        pass
