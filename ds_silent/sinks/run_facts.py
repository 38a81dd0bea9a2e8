"""``run.json``: what was switched on when a run began, so that who reads its records knows what was not looked at.

text = run_text(config, framework="DeepSpeed", ranks=4, training=facts, observed={"replicas": True})
FactsSink(directory).write(record)       # and what becomes known later, where it is another than before
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_silent.extras import version_of
from ds_silent.records import DataDealt, Event, Scores, StepRecord, to_json

if TYPE_CHECKING:  # who only reads records should not wait for the configuration's imports
    from ds_silent.config import SilentConsistencyConfig

logger = logging.getLogger("ds_silent")
VERSION = 1
_PACKAGES = {"DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}
_MAY_HOLD_SECRETS = ("alerts",)  # addresses with tokens in them


def run_text(
    config: SilentConsistencyConfig,
    framework: str,
    ranks: int,
    training: Mapping[str, Any],
    observed: Mapping[str, bool],
) -> str:
    """JSON, an object.

    Args:
        training: what the framework's collectives follow from, as all ranks have agreed: JSON values.
        observed: what can be seen in this setting.
    """
    block = config.model_dump(mode="json")
    for key in _MAY_HOLD_SECRETS:
        if key in block:
            held = block[key]
            block[key] = f"{len(held)} left out" if isinstance(held, list) else "left out"
    facts = {
        "version": VERSION,
        "ds_silent": version_of("ds_silent"),
        "framework": framework,
        "framework_version": version_of(_PACKAGES.get(framework, "torch")),
        "torch": version_of("torch"),
        "world_size": ranks,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "training": dict(training),
        "observed": dict(observed),
        "data": to_json(DataDealt()),
        "block": block,
    }
    return json.dumps(facts, indent=1, default=str) + "\n"


class FactsSink:
    """Writes ``data`` into the ``run.json`` of a directory, where there is one, as a whole file each time."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / "run.json"
        self._known = DataDealt()

    def write(self, record: StepRecord) -> None:
        if record.data is None or record.data == self._known:
            return
        self._known = record.data
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
            facts["data"] = to_json(record.data)
            beside = self._path.with_name("run.json.new")
            beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self._path)
        except Exception as error:  # who reads the records can do without it
            logger.debug("ds_silent: run.json keeps what it has: %s: %s", type(error).__name__, error)

    def write_scores(self, scores: Scores) -> None:
        """None of its business."""

    def write_event(self, event: Event) -> None:
        """None of its business."""

    def flush(self) -> None:
        """Each file is whole."""

    def close(self) -> None:
        """Nothing is open."""
