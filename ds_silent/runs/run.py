"""One run: what its directory holds, whatever that is.

run = read_run("runs/my-run")      # ReadingError: one sentence
run.steps, run.events, run.scores, run.spread, run.layers, run.matrices, run.preflight, run.places, run.facts
run.problems                       # what could not be read, a sentence each
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ds_silent.records import FORMAT, DataDealt, newer_version
from ds_silent.runs.events import EventLog, Place, places
from ds_silent.runs.follow import Follower
from ds_silent.runs.scores import ScoreTable
from ds_silent.runs.spread import Envelope, RankSpread
from ds_silent.runs.steps import Steps
from ds_silent.runs.values import MOST_RANKS, number, numbers, of, text, whole
from ds_silent.sinks.jsonl import newer_lines
from ds_silent.sinks.per_rank import PerRankError, read_per_rank
from ds_silent.sinks.run_facts import is_gone

LINES = {
    "metrics.jsonl": ("step",),
    "events.jsonl": ("step", "kind"),
    "scores.jsonl": ("step", "scores"),
    "layers.jsonl": ("step", "layers"),
    "matrices.jsonl": ("step", "cosines"),
}
"""The files of lines, and what every line of each has."""
OBJECTS = ("run.json", "ranks.json", "preflight.json")
Listen = Callable[[str, dict[str, Any] | None], None]
MOST_MATRICES = 48
MOST_LAYERS = 2000
LONG = 3600.0
"""Seconds without a record after which a run on another host may have ended."""
_LARGEST_OBJECT = 1 << 26


class ReadingError(ValueError):
    """There is no run to read; the message is one sentence."""


@dataclass
class Layers:
    """Of each layer: the dispersion of its gradient's norm over the ranks, and the mean cosine."""

    names: list[str] = field(default_factory=list)
    envelope: Envelope | None = None  # 2 x layers numbers: cv, cosine

    def add(self, line: dict[str, Any]) -> bool:
        """A line of layers.jsonl; False where it is none."""
        step, layers = whole(line.get("step")), line.get("layers")
        if step is None or type(layers) is not list:
            return False
        known = [one for one in layers[:MOST_LAYERS] if type(one) is dict]
        names = [text(one.get("name"), 200) for one in known]
        if self.envelope is None or names != self.names:
            self.names, self.envelope = names, Envelope(2 * len(names))
        row = [number(one.get(key)) for key in ("norm_cv", "mean_cosine") for one in known]
        with np.errstate(over="ignore"):
            self.envelope.add(step, np.array([math.nan if v is None else v for v in row], dtype=np.float32))
        return True


@dataclass
class Matrices:
    """The N x N cosines at some steps: of many the first, the last and some between."""

    kept: list[tuple[int, list[list[float]]]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> bool:
        """A line of matrices.jsonl; False where it is none."""
        step, rows = whole(line.get("step")), line.get("cosines")
        if step is None or type(rows) is not list or not 0 < len(rows) <= 256:
            return False
        table = [numbers(row) for row in rows]
        if any(row is None or len(row) != len(rows) for row in table):
            return False
        self.kept = [one for one in self.kept if one[0] < step]
        self.kept.append((step, [row for row in table if row is not None]))
        if len(self.kept) > MOST_MATRICES:
            del self.kept[1:-1:2]
        return True


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        facts: of ``run.json``; {} of a run that wrote none.
        places: by rank.
        skipped: lines that are none of ours, by file.
    """

    directory: Path
    steps: Steps = field(default_factory=Steps)
    events: EventLog = field(default_factory=EventLog)
    scores: ScoreTable = field(default_factory=ScoreTable)
    spread: RankSpread = field(default_factory=RankSpread)
    layers: Layers = field(default_factory=Layers)
    matrices: Matrices = field(default_factory=Matrices)
    preflight: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    newer: dict[tuple[str, int], int] = field(default_factory=dict)  # file and version -> lines that are left out
    versions: dict[str, int] = field(default_factory=dict)  # of the files that are one object
    unreadable: dict[str, str] = field(default_factory=dict)  # file -> why
    lost: Literal["", "gone", "silent"] = ""  # without an end: its process is no more, or nothing was written for long

    @property
    def name(self) -> str:
        """As a person calls it: its directory."""
        return text(os.fspath(self.directory), 200) or "run"

    @property
    def world_size(self) -> int:
        """Ranks, as the newest record has them; 0 where nothing says it."""
        worlds = self.steps.world_size
        if len(worlds) and worlds[-1]:
            return int(worlds[-1])
        said = (whole(of(held, "world_size"), MOST_RANKS) for held in (self.facts, self.preflight))
        return next((ranks for ranks in said if ranks), len(self.places))

    @property
    def hosts(self) -> list[str]:
        """Each once."""
        return sorted({place.host for place in self.places.values()})

    @property
    def data(self) -> str:
        """How the rows come to the ranks, in a few words; "" where a run of before does not say."""
        dealt, by = (text(of(self.facts, "data", key), 200) for key in ("dealt", "by"))
        return DataDealt(dealt, by).sentence if dealt and by else ""  # type: ignore[arg-type]  # a later version's

    @property
    def problems(self) -> list[str]:
        """A sentence for each."""
        torn = [
            f"{name}: {count} torn or foreign line{'s' * (count != 1)} skipped."
            for name, count in self.skipped.items()
            if count
        ]
        newer = [f"{name}: {newer_lines(version, count)}." for (name, version), count in sorted(self.newer.items())]
        versions = [
            f"{name} is of format version {version}, newer than this ds_silent knows; what it knows is shown."
            for name, version in sorted(self.versions.items())
            if version > FORMAT
        ]
        return [*(f"{name} cannot be read: {why}." for name, why in self.unreadable.items()), *torn, *newer, *versions]

    @property
    def broke_off(self) -> str:
        """That the training did so, in words; "" where it goes on, has ended, or nobody says."""
        error, step = text(of(self.facts, "ended", "error"), 60), whole(of(self.facts, "ended", "step"))
        if error:
            return f"The training ended with {error} after step {step or 0:,}"
        last = f"step {int(self.steps.step[-1]):,}" if len(self.steps) else "its start"
        if self.lost == "gone":
            return f"The run was killed or crashed after {last}: its end is not recorded"
        return f"No end of the run is recorded after {last}, and nothing else for an hour" if self.lost else ""

    @property
    def empty(self) -> bool:
        """Whether nothing is known of it."""
        return not (len(self.steps) or len(self.events) or self.preflight or self.facts)


class RunReader:
    """Reads a run as it grows. Raises nothing: what cannot be read is in ``run.problems``.

    Args:
        names: the files of lines that are read.
        listen: called with a file's name and each line of it that was taken up, in their order; with None where what
            was read of it before is no more.
    """

    def __init__(self, directory: str | Path, names: Iterable[str] = tuple(LINES), listen: Listen | None = None):
        self.run = Run(Path(directory))
        self._followers = {name: Follower(self.run.directory / name, LINES[name]) for name in names}
        self._listen = listen
        self._seen: dict[str, tuple[int, ...]] = {}

    def poll(self) -> bool:
        """Take up what is new, at most 8 MiB of each file; whether there was anything."""
        changed = self._objects()
        for name, follower in self._followers.items():
            news = follower.poll()
            if news.restarted:
                self._anew(name)
            _set(self.run.unreadable, name, follower.problem)
            changed |= self._take(name, news.objects, news.broken) or news.restarted or news.more
        self.run.lost = self._lost()
        return changed

    def _lost(self) -> Literal["", "gone", "silent"]:
        """A run of before says neither an end nor a process."""
        run = self.run
        if run.facts.get("ended", True) is not None:
            return ""
        gone = is_gone(run.facts.get("process"))
        if gone is not None:
            return "gone" if gone else ""
        try:
            written = max(path.stat().st_mtime for path in run.directory.glob("*.json*"))
        except (OSError, ValueError):
            return ""
        every = (run.steps.last("step seconds") or 0.0) * (whole(of(run.facts, "block", "interval")) or 1)
        return "silent" if time.time() - written > max(LONG, 20.0 * every) else ""

    def finish(self) -> Run:
        """All there is, and what a run that is over has left torn."""
        while self.poll():
            pass
        for name, follower in self._followers.items():
            news = follower.rest()
            self._take(name, news.objects, news.broken)
        self._per_rank()
        return self.run

    def _take(self, name: str, objects: list[dict[str, Any]], broken: int) -> bool:
        add = self._adder(name)
        for version in filter(None, map(newer_version, objects)):
            self.run.newer[name, version] = self.run.newer.get((name, version), 0) + 1
        known = [one for one in objects if not newer_version(one)]
        taken = [one for one in known if add(one)]
        broken += len(known) - len(taken)
        if self._listen is not None:
            for one in taken:
                self._listen(name, one)
        if broken:
            self.run.skipped[name] = self.run.skipped.get(name, 0) + broken
        return bool(objects or broken)

    def _adder(self, name: str) -> Any:
        run = self.run
        return {
            "metrics.jsonl": self._metrics,
            "events.jsonl": run.events.add,
            "scores.jsonl": run.scores.add,
            "layers.jsonl": run.layers.add,
            "matrices.jsonl": run.matrices.add,
        }[name]

    def _metrics(self, line: dict[str, Any]) -> bool:
        if not self.run.steps.add(line):
            return False
        each = [numbers(of(line, key, "per_rank")) for key in ("loss", "grad_norm", "direction")]
        if any(each):
            with np.errstate(over="ignore"):
                self.run.spread.add(line["step"], *each)
        return True

    def _anew(self, name: str) -> None:
        run = self.run
        if self._listen is not None:
            self._listen(name, None)
        run.skipped.pop(name, None)
        run.newer = {key: count for key, count in run.newer.items() if key[0] != name}
        if name == "metrics.jsonl":
            run.steps, run.spread = Steps(), RankSpread()
        elif name == "events.jsonl":
            run.events = EventLog()
        elif name == "scores.jsonl":
            run.scores = ScoreTable()
        elif name == "layers.jsonl":
            run.layers = Layers()
        else:
            run.matrices = Matrices()

    def _objects(self) -> bool:
        """The small files that are written at the start, where they have changed."""
        changed = False
        for name in OBJECTS:
            path = self.run.directory / name
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            except OSError:
                continue
            if self._seen.get(name) == stamp:
                continue
            self._seen[name], changed = stamp, True
            held, problem = _object(path, status.st_size)
            _set(self.run.unreadable, name, problem)
            self.run.versions[name] = whole(held.get("version")) or FORMAT
            if name == "run.json":
                self.run.facts = held
            elif name == "preflight.json":
                self.run.preflight = held
            else:
                self.run.places = {place.rank: place for place in places(held.get("ranks"))}
        return changed

    def _per_rank(self) -> None:
        path = self.run.directory / "per_rank.bin"
        if not path.is_file():
            return
        last = -1
        try:
            for step in read_per_rank(path):
                if step.step > last:
                    self.run.spread.add(step.step, step.loss, step.grad_norm, step.cosine)
                last = step.step
        except (PerRankError, OSError, ValueError, OverflowError, MemoryError) as error:
            _set(self.run.unreadable, "per_rank.bin", text(str(error), 300) or type(error).__name__)


def read_run(directory: str | Path) -> Run:
    """Everything that a run's directory holds.

    Raises:
        ReadingError: it is no directory.
    """
    path = Path(directory)
    try:
        is_there = path.is_dir()
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        raise ReadingError(f"{os.fspath(directory)!a} is no directory of a run; give the output_dir of its block")
    return RunReader(path).finish()


def find_runs(directory: str | Path, most: int = 64) -> list[Path]:
    """The directories of runs in it, itself first: a demonstration, several engines or stages, runs one after another.

    Raises:
        ReadingError: it is no directory, or there are no records in it.
    """
    path = Path(directory)
    found: list[Path] = []
    try:
        if not path.is_dir():
            raise ReadingError(f"{os.fspath(directory)!a} is no directory of a run; give the output_dir of its block")
        below = [path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))]
        names = (*LINES, "per_rank.bin", "preflight.json", "run.json")
        found = [one for one in below if any((one / name).is_file() for name in names)]
    except (OSError, ValueError) as error:
        if isinstance(error, ReadingError):
            raise
        raise ReadingError(f"{os.fspath(directory)!a} cannot be read ({error}); give the output_dir of a run") from None
    if not found:
        raise ReadingError(
            f"{os.fspath(directory)!a} holds no records of ds_silent; give the output_dir of a run that has begun"
        )
    return found[:most]


def _object(path: Path, size: int) -> tuple[dict[str, Any], str | None]:
    """A small file's object, and why there is none."""
    if size > _LARGEST_OBJECT:
        return {}, f"it is larger than {_LARGEST_OBJECT >> 20} MiB"
    try:
        held = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, error.strerror or type(error).__name__
    except (ValueError, RecursionError):
        return {}, "it is no JSON, or torn"
    return (held, None) if isinstance(held, dict) else ({}, "it is no JSON object")


def _set(held: dict[str, str], name: str, problem: str | None) -> None:
    if problem is None:
        held.pop(name, None)
    else:
        held[name] = problem
