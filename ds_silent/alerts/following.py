"""Alerts from beside a run: the lines that come into its ``events.jsonl`` while somebody follows them.

following = FollowedEvents(["env:SLACK_URL"], run="runs/my-run")
following.line(line)        # each line of the file, in order; None: the file begins anew
following.caught_up()       # what follows is new; what was before is history, and nobody is woken for it
following.close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_silent.alerts.sink import open_alerts, refuse_unusable_alerts
from ds_silent.config import BLOCK, SilentConsistencyConfig, parse
from ds_silent.records import Event, Severity, from_json

_Identity = tuple[int, str, tuple[int, ...], str | None, str]


class FollowedEvents:
    """Args:
        to: destinations, as in the block.
        run: what the messages call it.
        level: events of this severity or worse.

    Raises:
        ConfigError: one of them is none; one sentence without a secret.
    """

    def __init__(self, to: Sequence[str], run: str, level: Severity = "warning") -> None:
        config = parse({BLOCK: {"alerts": [{"to": each, "level": level} for each in to]}}, "what was typed")
        assert isinstance(config, SilentConsistencyConfig)
        refuse_unusable_alerts(config.alerts)
        self._alerts = open_alerts(config.alerts, lambda: run)
        self._known: set[_Identity] = set()  # a resumed run writes some again, a rotated file all
        self._new = False

    def line(self, line: Mapping[str, Any] | None) -> None:
        """A line of the file; what is no event is nobody's business here."""
        if line is None:
            return
        try:
            event = from_json(Event, dict(line))
        except ValueError:
            return
        identity = (event.step, event.kind, event.ranks, event.where, event.severity)
        if identity in self._known:
            return
        self._known.add(identity)
        if self._new:
            self._alerts.write_event(event)
        else:
            self._alerts.note(event)

    def caught_up(self) -> None:
        """From now on lines are new."""
        self._new = True

    def close(self) -> None:
        """Waits for what is under way, a few seconds at most."""
        self._alerts.close()
