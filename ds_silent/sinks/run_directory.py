"""A run's directory: which run it belongs to, and ``run.json``, which says what was switched on when the run began.

    claim = claim_unused(Path("runs/my-run"))              # that directory, or run-2, run-3 ... below it
    claim = claim_used(Path("runs/my-run"), number=2)      # to go on there; None while another process writes
    claim.release()
    text = run_text(config, framework="DeepSpeed", ranks=4, training=facts, observed={"replicas": True})
    FactsSink(directory).write(record)                     # what becomes known later
    write_end(directory, end_of(step=40, error=None))
    is_gone(facts["process"])                              # whether the process that has written it is no more

A directory is used when one of its files of lines holds a byte. While a process writes, it holds a lock on
``metrics.jsonl``; where the file system has no locks, the creation of that file decides, which only one can win.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import socket
import sys
import weakref
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_silent.extras import version_of
from ds_silent.records import DataDealt, StepRecord, to_json
from ds_silent.sinks.base import Sink, logger
from ds_silent.sinks.files import in_children, make_directory, refused
from ds_silent.sinks.jsonl import parsed_line

if TYPE_CHECKING:  # who only reads records should not wait for the configuration's imports
    from ds_silent.config import SilentConsistencyConfig

try:
    import fcntl
except ImportError:  # no Unix: records can be read there
    fcntl = None  # type: ignore[assignment]

FILES = ("metrics.jsonl", "events.jsonl", "layers.jsonl")
_CHUNK = 1 << 16
_EXITING = 4  # PF_EXITING of Linux's include/linux/sched.h
_PACKAGES = {"DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}
_BESIDE = ("transformers", "trl", "accelerate", "lightning", "numpy")


class Claim:
    """A directory that this process alone writes to, until :meth:`release` or until nobody keeps the claim.

    ``number``: 1 for the directory that was named, n for ``run-n`` below it.
    """

    def __init__(self, directory: Path, number: int, lock: int) -> None:
        self.directory, self.number = directory, number
        self._lock = lock
        self._release = weakref.finalize(self, _unlock, lock)
        in_children(self, Claim.close_inherited)  # a worker that outlives a killed training must not keep the lock

    def release(self) -> None:
        """Let others write here."""
        self._release()

    def close_inherited(self) -> None:
        """In a forked child: the lock is the parent's, and must end with the parent."""
        if self._release.detach() is not None:
            os.close(self._lock)


def run_directory(base: Path, number: int) -> Path:
    """Return the directory of the ``number``-th run below ``base``, from 1."""
    return base if number == 1 else base / f"run-{number}"


def runs_of(base: Path) -> list[int]:
    """Return the numbers of the runs that have left records below ``base``, ascending."""
    try:
        names = [re.fullmatch(r"run-([1-9]\d{0,8})", path.name) for path in base.iterdir()]
    except OSError:
        return []
    numbers = {1, *(int(name[1]) for name in names if name)}
    return [number for number in sorted(numbers) if is_used(run_directory(base, number))]


def is_used(directory: Path) -> bool:
    """Return whether a run has left records there."""
    for path in (directory / name for name in FILES):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size:
                return True
    return False


def claim_unused(base: Path, *, first_only: bool = False) -> Claim | None:
    """Claim the first directory of ``base``, ``base/run-2`` ... in which nothing stands and nobody writes.

    ``first_only``: ``base`` itself or nothing. Raises SinkError where it cannot be written.
    """
    claims = (_claim(base, number, unused=True) for number in ((1,) if first_only else itertools.count(1)))
    return next((claim for claim in claims if claim is not None), None)


def claim_used(base: Path, number: int) -> Claim | None:
    """Claim the ``number``-th run's directory, to go on there; None while another process writes to it.

    Raises SinkError where it cannot be written.
    """
    return _claim(base, number, unused=False)


def _claim(base: Path, number: int, *, unused: bool) -> Claim | None:
    directory = run_directory(base, number)
    make_directory(directory)
    path, created = directory / FILES[0], True
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT
    try:
        try:
            lock = os.open(path, flags | os.O_EXCL, 0o644)
        except FileExistsError:
            lock, created = os.open(path, flags, 0o644), False
    except OSError as error:
        raise refused(path, error) from None
    locked = _try_lock(lock)
    free = locked is not False and (not unused or created or (locked is True and not is_used(directory)))
    if not free or not os.fstat(lock).st_nlink:  # an engine that never stepped has just taken its empty files away
        os.close(lock)
        return None
    return Claim(directory, number, lock)


def _try_lock(descriptor: int) -> bool | None:
    """Return True: locked; False: somebody else has; None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # where there are no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was started otherwise may still hold the descriptor
    os.close(descriptor)


def identity(directory: Path) -> str | None:
    """Return what a checkpoint remembers of its records: a hash of their first line, which holds two measured times.

    It moves with a directory that is renamed or copied; None where no step has been recorded yet.
    """
    try:
        with open(directory / FILES[0], "rb") as file:
            line = file.readline()
    except OSError:
        return None
    return hashlib.sha256(line).hexdigest()[:16] if line.endswith(b"\n") else None


def holds_step(directory: Path, step: int, samples: int, interval: int) -> bool:
    """Return whether a training that has done ``step`` steps with ``samples`` samples may be the one recorded there.

    ``interval``: steps between records.
    """
    for line in _lines_backwards(directory / FILES[0]):  # after a resume, what was written last is what counts
        record = parsed_line(line, ("step", "samples"))
        if record is None or type(record["samples"]) is not int:
            continue
        if record["step"] == step:
            return bool(record["samples"] == samples)
        if record["step"] < step:
            return bool(step - record["step"] < interval and record["samples"] < samples)
    return step < interval  # no record was due yet


def _lines_backwards(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        position, rest = file.seek(0, os.SEEK_END), b""
        while position:
            size = min(_CHUNK, position)
            position = file.seek(position - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


# -- run.json ----------------------------------------------------------------------------------------------------------


def run_text(
    config: SilentConsistencyConfig,
    framework: str,
    ranks: int,
    training: Mapping[str, Any],
    observed: Mapping[str, bool],
    settings: Mapping[str, tuple[Any, str]] | None = None,
) -> str:
    """Return JSON, an object.

    ``training``: what the framework's collectives follow from, as all ranks agreed; ``observed``: what can be seen;
    ``settings``: by name a value and whose it is: "yours", "default" or "framework".
    """
    block = config.model_dump(mode="json")
    if block.get("alerts"):  # addresses with tokens in them
        block["alerts"] = f"{len(block['alerts'])} left out"
    facts = {
        "version": 1,
        "ds_silent": version_of("ds_silent"),
        "framework": framework,
        "framework_version": version_of(_PACKAGES.get(framework, "torch")),
        "torch": version_of("torch"),
        "world_size": ranks,
        "started": _now(),
        "ended": None,
        "process": process_of(os.getpid()),
        "training": dict(training),
        "observed": dict(observed),
        "data": to_json(DataDealt()),
        "settings": {name: {"value": value, "from": origin} for name, (value, origin) in (settings or {}).items()},
        "block": block,
    }
    return json.dumps(facts, indent=1, default=str) + "\n"


def versions_of(framework: str) -> dict[str, str]:
    """Return the versions of Python, of the framework, and of other packages that this process has imported."""
    names = ["ds_silent", "torch", _PACKAGES.get(framework, "torch"), *(one for one in _BESIDE if one in sys.modules)]
    known = {name: version for name in names if (version := version_of(name)) is not None}
    return {"python": platform.python_version(), **known}


def end_of(step: int, error: BaseException | None, processes: Mapping[int, Any] | None = None) -> dict[str, Any]:
    """Return ``ended`` of ``run.json``: when the observation ends, and by what.

    ``processes``: of ranks of this host. Where a collective may have failed, ``gone`` are the ranks whose process is no
    more: nothing else is known of the end of a rank that does not write.
    """
    wanted = not isinstance(error, Exception) or isinstance(error, StopIteration)  # an interrupt; the data are over
    broke = None if wanted else type(error).__name__
    ranks = (processes or {}).items() if isinstance(error, RuntimeError | OSError) else ()
    return {
        "at": _now(),
        "step": step,
        "error": broke,
        "interrupted": isinstance(error, KeyboardInterrupt),
        "gone": [rank for rank, process in ranks if is_gone(process)],
    }


def write_end(directory: Path, ended: Mapping[str, Any]) -> None:
    """Say in ``run.json`` that the observation has ended, and by what; a run that was killed says nothing."""
    _add(directory / "run.json", "ended", ended)


def is_gone(process: Any) -> bool | None:
    """Return whether a process, as ``run.json`` names it, is no more; None where that is not known here."""
    if not isinstance(process, dict) or type(process.get("pid")) is not int:
        return None
    now = process_of(process["pid"])
    same_place = all(now[key] is not None and now[key] == process.get(key) for key in ("host", "pid_namespace"))
    return now["began"] != process.get("began") if same_place and process.get("began") is not None else None


def process_of(number: int) -> dict[str, Any]:
    """Name a process of this host by what no later one has: when it began, in clock ticks since the host did."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = None  # no Linux
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ends = state in "ZX" or int(rest[5]) & _EXITING  # the others learn of it by its sockets, which close before
        began = None if ends else int(rest[18])
    except (OSError, ValueError, IndexError):
        began = None
    return {"host": socket.gethostname(), "pid_namespace": namespace, "pid": number, "began": began}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _add(path: Path, key: str, value: Any) -> None:
    """Put it into the object that stands there, as a whole file."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        facts[key] = value
        beside = path.with_name("run.json.new")
        beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except Exception as error:  # who reads the records can do without it
        logger.debug("ds_silent: run.json keeps what it has: %s: %s", type(error).__name__, error)


class FactsSink(Sink):
    """Writes ``data`` into the ``run.json`` of a directory, where there is one, as a whole file each time."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / "run.json"
        self._written = DataDealt()

    def write(self, record: StepRecord) -> None:
        if record.data is not None and record.data != self._written:
            self._written = record.data
            _add(self._path, "data", to_json(record.data))
