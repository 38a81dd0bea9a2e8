"""The one line that a run prints at its end, counted as its records pass: nothing is read back.

summary = RunSummary()
summary.write(record)
summary.write_event(event)
summary.line("runs/my-run")
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ds_silent.records import Event, StepRecord, to_json
from ds_silent.runs.events import in_words
from ds_silent.runs.run import RunRecords
from ds_silent.runs.verdict import verdict_of
from ds_silent.sinks.files import written_event


class RunSummary:
    """Counts what this process has measured; of a resumed run its last part."""

    def __init__(self) -> None:
        self.steps = 0
        self._ranks = 0
        self._unseen = {"reduction", "replicas"}  # what no record speaks of
        self._run: RunRecords | None = None  # only its events: a number for every step would be memory that grows

    @property
    def anything(self) -> bool:
        """Whether there is something to say."""
        return self.steps > 0 or self._run is not None

    def write(self, record: StepRecord) -> None:
        """Count a measured step."""
        self.steps += 1
        self._ranks = record.world_size
        seen = record.integrity
        if seen.relative_error is not None:
            self._unseen.discard("reduction")
        if seen.replica_groups is not None or seen.replica_group_count is not None:
            self._unseen.discard("replicas")

    def write_event(self, event: Event) -> None:
        """Count an event."""
        if self._run is None:
            self._run = RunRecords(Path())
        self._run.events.add(to_json(written_event(event)))

    def line(self, directory: str | None) -> str:
        """Return steps, events, the report's verdict, where the records are, and how to see them.

        Args:
            directory: None where nothing was written.
        """
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)} measured"
        where = "no records were written"
        if directory is not None:
            where = f"records in {directory}; see them: ds-silent report {shlex.quote(directory)}"
        events = in_words({} if self._run is None else self._run.events.findings) or "no events"
        return f"end  {steps}; {events}; verdict: {self._verdict()} {where[0].upper()}{where[1:]}"

    def _verdict(self) -> str:
        if self._run is not None:
            self._run.facts = {"world_size": self._ranks}
            verdict = verdict_of(self._run)
            if verdict.severity in ("error", "warning"):
                return verdict.sentence
        if not self.steps:
            return "nothing was measured."
        unseen = f"; not checked: {', '.join(sorted(self._unseen))}" if self._unseen else ""
        return f"no fault was seen{unseen}."
