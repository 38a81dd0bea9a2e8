"""``run.json``: what was switched on when a run began, so that who reads its records knows what was not looked at.

text = run_text(config, framework="DeepSpeed", ranks=4, training=facts, observed={"replicas": True})
FactsSink(directory).write(record)       # and what becomes known later, where it is another than before
write_end(directory, step=40, error=None)
is_gone(facts["process"])                # whether the process that has written it is no more
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_silent.extras import version_of
from ds_silent.records import DataDealt, StepRecord, to_json
from ds_silent.sinks.base import Sink

if TYPE_CHECKING:  # who only reads records should not wait for the configuration's imports
    from ds_silent.config import SilentConsistencyConfig

logger = logging.getLogger("ds_silent")
VERSION = 1
_PACKAGES = {"DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}


def run_text(
    config: SilentConsistencyConfig,
    framework: str,
    ranks: int,
    training: Mapping[str, Any],
    observed: Mapping[str, bool],
) -> str:
    """Return JSON, an object.

    ``training``: what the framework's collectives follow from, as all ranks agreed; ``observed``: what can be seen.
    """
    block = config.model_dump(mode="json")
    if "alerts" in block:  # addresses with tokens in them
        block["alerts"] = f"{len(block['alerts'])} left out"
    facts = {
        "version": VERSION,
        "ds_silent": version_of("ds_silent"),
        "framework": framework,
        "framework_version": version_of(_PACKAGES.get(framework, "torch")),
        "torch": version_of("torch"),
        "world_size": ranks,
        "started": _now(),
        "ended": None,
        "process": _process(os.getpid()),
        "training": dict(training),
        "observed": dict(observed),
        "data": to_json(DataDealt()),
        "block": block,
    }
    return json.dumps(facts, indent=1, default=str) + "\n"


def write_end(directory: Path, step: int, error: BaseException | None) -> None:
    """Say in ``run.json`` that the observation has ended, and by what; a run that was killed says nothing."""
    broke = type(error).__name__ if isinstance(error, Exception) else None  # an interrupt is somebody's wish
    _add(directory / "run.json", "ended", {"at": _now(), "step": step, "error": broke})


def is_gone(process: Any) -> bool | None:
    """Return whether a process, as ``run.json`` names it, is no more; None where that is not known here."""
    if not isinstance(process, dict) or type(process.get("pid")) is not int:
        return None
    now = _process(process["pid"])
    same_place = all(now[key] is not None and now[key] == process.get(key) for key in ("host", "pid_namespace"))
    return now["began"] != process.get("began") if same_place and process.get("began") is not None else None


def _process(number: int) -> dict[str, Any]:
    """Name a process of this host by what no later one has: when it began, in clock ticks since the host did."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = None  # no Linux
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        began = None if state in "ZX" else int(rest[18])
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
