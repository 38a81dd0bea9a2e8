"""``ds-silent alert --test TO``: one message to each destination, now, and whether it arrived."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ds_silent.alerts.message import Alert
from ds_silent.alerts.senders import NotSent, sender_of
from ds_silent.alerts.sink import usable
from ds_silent.config.destination import TRACKERS, WrongDestination
from ds_silent.text import mistake, one_line


def alert_command(to: Sequence[str], seconds: float) -> int:
    """Send a test message to each, within so many seconds; the worst exit status: 0 sent, 1 not sent, 2 a mistake."""
    return max((_tried(each, seconds) for each in to), default=2)


def _tried(to: str, seconds: float) -> int:
    try:
        destination = usable(to)
        if destination.form in TRACKERS or destination.form == "monitor":
            must = "be reached without a training, because it belongs to a training's run"
            remedy = "its alerts come with the first event; test a webhook, a mail or a command"
            raise WrongDestination(must, f'"{destination}"', remedy)
    except WrongDestination as error:
        return mistake(f"a destination {error}")
    text = "This is a test: alerts of ds_silent arrive here. No training is meant."
    hosts = (one_line(socket.gethostname()),)
    alert = Alert("INFO: test of ds_silent's alerts", text, "info", "test", "no run", 0, (), hosts, "Nothing to do.")
    try:
        sender_of(destination, seconds)(alert)
    except NotSent as error:
        mistake(f"nothing was sent to {destination}: {error}")
        return 1
    print(f"sent to {destination} ({destination.form})")
    return 0
