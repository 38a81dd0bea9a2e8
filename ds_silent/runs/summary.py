"""The one line that a run prints at its end, counted as its records pass: nothing is read back.

summary = RunSummary(label="engine-2")
summary.directory = "runs/my-run"
summary.close()                     # prints: steps, events, the report's verdict, and the command that shows the rest
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_silent.records import Event, StepRecord, to_json
from ds_silent.runs.events import in_words
from ds_silent.runs.run import RunRecords
from ds_silent.runs.verdict import noted, verdict_of
from ds_silent.sinks.base import Sink
from ds_silent.sinks.console import say, speaker
from ds_silent.sinks.files import written_event
from ds_silent.text import one_line


class RunSummary(Sink):
    """Counts what this process has measured, of a resumed run its last part; prints a line when it is closed.

    Attributes:
        directory: of the records; None while nothing is written.
        files: what writes there.
        ended: how the training has ended, as ``run.json`` says it; None while that is not known.
    """

    def __init__(self, label: str | None = None) -> None:
        self.directory: str | None = None
        self.files: Sequence[Sink] = ()
        self.ended: Mapping[str, Any] | None = None
        self._name = speaker(label)
        self._steps = self._ranks = 0
        self._unseen = {"reduction", "replicas"}  # what no record speaks of
        self._run: RunRecords | None = None  # only its events: a number for every step would be memory that grows

    def write(self, record: StepRecord) -> None:
        self._steps += 1
        self._ranks = record.world_size
        checked = record.integrity
        if checked.relative_error is not None:
            self._unseen.discard("reduction")
        if checked.replica_groups is not None or checked.replica_group_count is not None:
            self._unseen.discard("replicas")

    def write_event(self, event: Event) -> None:
        self._run = self._run or RunRecords(Path())
        self._run.events.add(to_json(written_event(event)))

    def close(self) -> None:
        """Print the line, once; none where nothing was measured and nothing found."""
        steps, run = self._steps, self._run
        if not steps and run is None:
            return
        self._steps, self._run = 0, None
        where = "No records were written"
        if self.directory is not None and not Path(self.directory).is_dir():
            where = f"The records are gone: {self.directory} was deleted or moved while the training ran"
        elif self.directory is not None:
            broken = [type(sink).__name__.removesuffix("Sink") for sink in self.files if sink.broken]
            stopped = f"{', '.join(broken)} {'has' if len(broken) == 1 else 'have'} stopped writing"
            less = f", not complete ({stopped})" if broken else ""
            where = f"Records in {self.directory}{less}; see them: ds-silent report {shlex.quote(self.directory)}"
        events = in_words(run.events.findings if run else {}) or "no events"
        measured = f"{steps:,} step{'s' * (steps != 1)} measured"
        line = f"end  {measured}; {events}; verdict: {self._verdict(steps, run or RunRecords(Path()))} {where}"
        say(f"{self._name} {one_line(line)}")
        sys.stdout.flush()

    def _verdict(self, steps: int, run: RunRecords) -> str:
        run.facts = {"world_size": self._ranks, "ended": self.ended}
        verdict = verdict_of(run)
        if verdict.group is not None:
            return verdict.sentence
        unseen = f"; not checked: {', '.join(sorted(self._unseen))}" if self._unseen else ""
        seen = f"no fault was seen{noted(run)}{unseen}." if steps else "nothing was measured."
        return f"{run.broke_off}; until then {seen}" if run.broke_off else seen
