"""Everything that a run's directory holds, read once, or as its files grow, are truncated, replaced or not there yet.

run = read_run("runs/my-run")      # ReadingError: one sentence
run.steps, run.events, run.scores, run.layers, run.matrices, run.preflight, run.places, run.facts
run.problems                       # what could not be read, a sentence each

follower = Follower(Path("runs/my-run/metrics.jsonl"), ("step",))
follower.poll().objects            # of the lines that have come since the last call
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ds_silent.distributed.parts import ranks_of
from ds_silent.json_form import FORMAT, newer_version
from ds_silent.records import DataDealt
from ds_silent.runs.columns import Layers, Matrices, ScoreTable, StepTable
from ds_silent.runs.events import EventGroup, EventLog, RankPlace, done_alike, places
from ds_silent.runs.lines import MOST_RANKS, of, ranks, text, whole
from ds_silent.sinks.jsonl import LONGEST_LINE, newer_lines, parsed_line
from ds_silent.sinks.per_rank import COLUMNS, PerRankError, read_per_rank
from ds_silent.sinks.run_directory import is_gone, run_directory, runs_of

_AT_ONCE = 1 << 23
_WITNESS = 64  # bytes before the place that was reached, which must still be the same


@dataclass(frozen=True)
class News:
    """Lines that have come since the last call."""

    objects: list[dict[str, Any]]
    restarted: bool = False  # what was read before is gone: begin anew with these
    broken: int = 0  # lines that are not such objects
    more: bool = False  # there is more already: poll again


class Follower:
    """Reads one file, at most 8 MiB of whole lines a call; a torn last line waits for its end.

    ``problem``: why the file cannot be read, in a few words; None where it can, or is not there.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]):
        self._path, self._keys = path, keys
        self._place, self._file = 0, (0, 0)
        self._witness = b""
        self._skipping = False  # within a line that is too long
        self.problem: str | None = None

    def poll(self) -> News:
        """Return what is new. Raises nothing."""
        self.problem = None
        try:
            with open(self._path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return News([], restarted=self._forget())
        except OSError as error:
            self.problem = error.strerror or type(error).__name__
            return News([])

    def rest(self) -> News:
        """Return a last line without an end, once the run is over and none will come."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._place)
                line = file.read(LONGEST_LINE)
        except OSError:
            return News([])
        return self._news([b"" if b"\n" in line else line] if line.strip() else [])

    def _news(self, lines: list[bytes], restarted: bool = False, more: bool = False) -> News:
        found = [parsed_line(line, self._keys) for line in lines]
        objects = [one for one in found if one is not None]
        return News(objects, restarted, len(found) - len(objects), more)

    def _read(self, file: BinaryIO) -> News:
        status = os.fstat(file.fileno())
        same = (status.st_dev, status.st_ino) == self._file and status.st_size >= self._place
        if same and self._place:
            file.seek(self._place - len(self._witness))
            same = file.read(len(self._witness)) == self._witness
        restarted = False if same else self._forget()
        self._file = (status.st_dev, status.st_ino)
        file.seek(self._place)
        data = file.read(_AT_ONCE)
        end, full = data.rfind(b"\n") + 1, len(data) == _AT_ONCE
        if not end and not full:  # its end is still to come
            return News([], restarted)
        taken = data[:end] if end else data
        self._place += len(taken)
        self._witness = (self._witness + taken[-_WITNESS:])[-_WITNESS:]
        more = full and self._place < status.st_size
        if not end:  # the line is too long to be ours
            broken, self._skipping = int(not self._skipping), True
            return News([], restarted, broken, more)
        lines = data[:end].split(b"\n")
        if self._skipping:
            lines, self._skipping = lines[1:], False
        return self._news([line for line in lines if line.strip()], restarted, more)

    def _forget(self) -> bool:
        """Begin anew; return whether anything had been read."""
        had, self._place, self._witness, self._skipping = self._place > 0, 0, b"", False
        self._file = (0, 0)
        return had


LINES: dict[str, tuple[str, Callable[[], Any], tuple[str, ...]]] = {
    "metrics.jsonl": ("steps", StepTable, ("step",)),
    "events.jsonl": ("events", EventLog, ("step", "kind")),
    "scores.jsonl": ("scores", ScoreTable, ("step", "scores")),
    "layers.jsonl": ("layers", Layers, ("step", "layers")),
    "matrices.jsonl": ("matrices", Matrices, ("step", "cosines")),
}
"""The files of lines: the attribute of a run that takes their lines, its type, and the keys of every line."""
OBJECTS = ("run.json", "ranks.json", "preflight.json")
Listen = Callable[[str, dict[str, Any] | None], None]
_NAMED_RANKS, _MOST_RUNS = 4, 64
SILENT_SECONDS = 3600.0
"""Time without a record after which a run on another host may have ended."""
_LARGEST_OBJECT = 1 << 26


class ReadingError(ValueError):
    """There is no run to read, or no page to write; the message is one sentence."""


@dataclass
class RunRecords:
    """The records of one run; ``places`` are by rank, ``skipped``, ``newer`` and ``versions`` by file.

    Attributes:
        skipped: lines that are torn or foreign; ``newer``: of a newer version, by file and version.
        unreadable: why a file cannot be read; None where it can.
        lost: the end of the run is not recorded: its process is gone, or nothing was written for long.
    """

    directory: Path
    steps: StepTable = field(default_factory=StepTable)
    events: EventLog = field(default_factory=EventLog)
    scores: ScoreTable = field(default_factory=ScoreTable)
    layers: Layers = field(default_factory=Layers)
    matrices: Matrices = field(default_factory=Matrices)
    preflight: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    places: dict[int, RankPlace] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    newer: Counter[tuple[str, int]] = field(default_factory=Counter)
    versions: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str | None] = field(default_factory=dict)
    lost: Literal["", "gone", "silent"] = ""

    @property
    def name(self) -> str:
        return text(os.fspath(self.directory), 200) or "run"

    @property
    def world_size(self) -> int:
        """The number of ranks as of the newest record; 0 where it is not known."""
        others = (whole(of(one, "world_size"), MOST_RANKS) for one in (self.facts, self.preflight))
        return self.steps.world_size or next(filter(None, others), len(self.places))

    @property
    def data(self) -> str:
        """How the rows are dealt to the ranks, in a few words; "" where an older run does not say."""
        dealt, by = (text(of(self.facts, "data", key), 200) for key in ("dealt", "by"))
        if not (dealt and by):
            return ""
        said = DataDealt(dealt, by).sentence  # type: ignore[arg-type]  # a later version's
        return f"{said}, but several ranks {self.done_alike}" if self.done_alike else said

    @property
    def done_alike(self) -> str:
        """What several ranks did alike at some steps, if anything: the noise between the ranks is too small there."""
        return done_alike(self.events.groups())

    @property
    def problems(self) -> list[str]:
        """A sentence for each thing that could not be read."""
        unreadable = [f"{name} cannot be read: {why}." for name, why in self.unreadable.items() if why is not None]
        torn = [f"{name}: {n} torn or foreign line{'s' * (n != 1)} skipped." for name, n in self.skipped.items()]
        newer = [f"{name}: {newer_lines(version, count)}." for (name, version), count in sorted(self.newer.items())]
        later = [(name, version) for name, version in sorted(self.versions.items()) if version > FORMAT]
        what = "newer than this ds_silent knows; what it knows is shown."
        versions = [f"{name} is of format version {version}, {what}" for name, version in later]
        return [*unreadable, *torn, *newer, *versions]

    def unread(self, name: str) -> int:
        """Count the lines of a file that were skipped: torn, foreign, or of a newer version."""
        return self.skipped[name] + sum(count for (file, _), count in self.newer.items() if file == name)

    @property
    def interrupted(self) -> bool:
        """Whether somebody has ended the training with Ctrl-C."""
        return of(self.facts, "ended", "interrupted") is True

    @property
    def broke_off(self) -> str:
        """The sentence for a training that broke off; "" where it goes on, has ended, or it is not known."""
        error, step = text(of(self.facts, "ended", "error"), 60), whole(of(self.facts, "ended", "step"))
        if error:
            gone = ranks(of(self.facts, "ended", "gone"))
            first = f", when {ranks_of(gone)} had gone without a recorded end" if gone else ""
            return f"The training ended with {error} after step {step or 0:,}{first}"
        if self.interrupted:
            return f"The training was interrupted after step {step or 0:,}"
        last = f"step {int(self.steps.step[-1]):,}" if len(self.steps) else "its start"
        if self.lost == "gone":
            first = ", nor which rank ended first" if self.world_size > 1 else ""
            full = (self.directory / "run.json.new").exists()  # which its end was to be written to
            what = "could not write its records any more" if full else "was killed or crashed"
            return f"The run {what} after {last}: its end is not recorded{first}"
        return f"No end of the run is recorded after {last}, and nothing else for an hour" if self.lost else ""

    @property
    def empty(self) -> bool:
        return not (len(self.steps) or len(self.events) or self.preflight or self.facts)

    def who(self, group: EventGroup) -> str:
        """Return the ranks of an event, with hosts where they are known: "Rank 2 (node0087:3)"; "" for none."""
        if not group.ranks:
            return ""
        total, world = group.total, self.world_size
        if world and total >= world > 1:
            return f"All {world:,} ranks" if world > 2 else "Both ranks"
        spots = self.places | {place.rank: place for place in reversed(group.places)}
        each = [f"{rank} ({spots[rank].spot})" if rank in spots else str(rank) for rank in group.ranks[:_NAMED_RANKS]]
        more = f" and {total - len(each):,} more" if total > len(each) else ""
        return f"Rank{'s' * (total > 1)} {', '.join(each)}{more}"


class RunReader:
    """Reads a run as it grows. Raises nothing: what cannot be read is in ``run.problems``.

    ``listen`` is called with a file's name and each line after it was added; with None where the file begins anew.
    """

    def __init__(self, directory: str | Path, names: Iterable[str] = tuple(LINES), listen: Listen | None = None):
        self.run = RunRecords(Path(directory))
        self._followers = {name: Follower(self.run.directory / name, LINES[name][2]) for name in names}
        self._listen = listen
        self._stamps: dict[str, tuple[int, ...]] = {}

    def poll(self) -> bool:
        """Read what is new, at most 8 MiB of each file; return whether there was anything."""
        changed = self._objects()
        for name, follower in self._followers.items():
            news = follower.poll()
            if news.restarted:
                self._restart(name)
            self.run.unreadable[name] = follower.problem
            changed |= self._take(name, news) or news.restarted or news.more
        self.run.lost = self._lost()
        return changed

    def _lost(self) -> Literal["", "gone", "silent"]:
        run = self.run
        if run.facts.get("ended", True) is not None:  # older runs record neither an end nor a process
            return ""
        gone = is_gone(run.facts.get("process"))
        if gone is not None:
            return "gone" if gone else ""
        try:
            written = max(path.stat().st_mtime for path in run.directory.glob("*.json*"))
        except (OSError, ValueError):
            return ""
        every = (run.steps.last("step seconds") or 0.0) * (whole(of(run.facts, "block", "interval")) or 1)
        return "silent" if time.time() - written > max(SILENT_SECONDS, 20.0 * every) else ""

    def finish(self) -> RunRecords:
        """Read everything, also a last line that was left without its end."""
        while self.poll():
            pass
        for name, follower in self._followers.items():
            self._take(name, follower.rest())
        self._per_rank()
        return self.run

    def _take(self, name: str, news: News) -> bool:
        run, broken = self.run, news.broken
        table = getattr(run, LINES[name][0])
        for line in news.objects:
            if version := newer_version(line):
                run.newer[name, version] += 1
            elif not table.add(line):
                broken += 1
            elif self._listen is not None:
                self._listen(name, line)
        if broken:
            run.skipped[name] += broken
        return bool(news.objects or broken)

    def _restart(self, name: str) -> None:
        """Forget what was read of this file."""
        run, (attribute, table, _) = self.run, LINES[name]
        if self._listen is not None:
            self._listen(name, None)
        run.skipped.pop(name, None)
        run.newer = Counter({key: count for key, count in run.newer.items() if key[0] != name})
        setattr(run, attribute, table())

    def _objects(self) -> bool:
        """Read the small files that are written at the start, where they have changed."""
        changed = False
        for name in OBJECTS:
            path = self.run.directory / name
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            except OSError:
                continue
            if self._stamps.get(name) == stamp:
                continue
            self._stamps[name], changed = stamp, True
            found, self.run.unreadable[name] = _object(path)
            self.run.versions[name] = whole(found.get("version")) or FORMAT
            if name == "run.json":
                self.run.facts = found
            elif name == "preflight.json":
                self.run.preflight = found
            else:
                self.run.places = {place.rank: place for place in places(found.get("ranks"))}
        return changed

    def _per_rank(self) -> None:
        path = self.run.directory / "per_rank.bin"
        if not path.is_file():
            return
        try:
            for step in read_per_rank(path):
                self.run.steps.spread.add(step.step, *(getattr(step, name) for name in COLUMNS))
        except (PerRankError, OSError, ValueError, OverflowError, MemoryError) as error:
            self.run.unreadable["per_rank.bin"] = text(str(error), 300) or type(error).__name__


def read_run(directory: str | Path) -> RunRecords:
    """Read everything that a run's directory holds; ReadingError where it is not a directory."""
    if not os.path.isdir(directory):
        raise _no_directory(directory)
    return RunReader(directory).finish()


def find_runs(directory: str | Path) -> list[Path]:
    """Return the directories of runs in it, itself first: several engines or stages; of very many runs the newest.

    Raises ReadingError where it is not a directory, or there are no records in it.
    """
    path, shown, found = Path(directory), ascii(os.fspath(directory)), []
    try:
        is_there = path.is_dir()
        below = [path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))] if is_there else []
        names = (*LINES, "per_rank.bin", "preflight.json", "run.json")
        found = [one for one in below if any((one / name).is_file() for name in names)]
    except (OSError, ValueError) as error:
        raise ReadingError(f"{shown} cannot be read ({error}); give the output_dir of a run") from None
    if not is_there:
        raise _no_directory(directory)
    if not found:
        raise ReadingError(f"{shown} holds no records of ds_silent; give the output_dir of a run that has begun")
    newest = sorted(found, key=lambda one: one.stat().st_mtime)[-_MOST_RUNS:]
    return [one for one in found if one in newest]


def newest_run(base: Path) -> Path:
    """Return the directory of the run that has begun last of those of ``base``; ``base`` where there are none."""
    runs = [run_directory(base, number) for number in runs_of(base)]
    return newest_of(runs) if runs else base


def newest_of(runs: Sequence[Path]) -> Path:
    """Return the run that has begun last; the last of those that do not say when."""
    began = [str(_object(one / "run.json")[0].get("started", "")) for one in runs]
    return max(zip(began, range(len(runs)), runs, strict=True))[2]


def _no_directory(directory: str | Path) -> ReadingError:
    return ReadingError(f"{os.fspath(directory)!a} is no directory of a run; give the output_dir of its block")


def _object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return a small file's object, and why there is none."""
    try:
        if path.stat().st_size > _LARGEST_OBJECT:
            return {}, f"it is larger than {_LARGEST_OBJECT >> 20} MiB"
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, error.strerror or type(error).__name__
    except (ValueError, RecursionError):
        return {}, "it is no JSON, or torn"
    return (found, None) if isinstance(found, dict) else ({}, "it is no JSON object")
