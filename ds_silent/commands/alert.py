"""``ds-silent alert --test TO``: one message to each destination, now, and whether it arrived."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from ds_silent.alerts.message import Alert
from ds_silent.alerts.senders import NotSent, sender_of
from ds_silent.alerts.sink import usable
from ds_silent.config.destination import TRACKERS, Destination, WrongDestination
from ds_silent.text import one_line

SENT, NOT_SENT, WRONG = 0, 1, 2
"""Exit statuses."""


def alert_command(to: Sequence[str], seconds: float) -> int:
    """Send a test message to each, within so many seconds; the exit status of the worst."""
    return max((_tried(each, seconds) for each in to), default=WRONG)


def _tried(to: str, seconds: float) -> int:
    try:
        destination = usable(to)
        _refuse_without_a_training(destination)
    except WrongDestination as error:
        print(f"ds-silent: a destination {error}", file=sys.stderr)
        return WRONG
    try:
        sender_of(destination, seconds)(test_message())
    except NotSent as error:
        print(f"ds-silent: nothing was sent to {destination}: {error}", file=sys.stderr)
        return NOT_SENT
    print(f"sent to {destination} ({destination.form})")
    return SENT


def test_message() -> Alert:
    """What a person reads who wonders whether alerts arrive."""
    host = one_line(socket.gethostname())
    text = "This is a test: alerts of ds_silent arrive here. No training is meant."
    return Alert("INFO: test of ds_silent's alerts", text, "info", "test", "no run", 0, (), (host,), "Nothing to do.")


def _refuse_without_a_training(destination: Destination) -> None:
    if destination.form in TRACKERS or destination.form == "monitor":
        remedy = "its alerts come with the first event; test a webhook, a mail or a command"
        what = "be reached without a training, because it belongs to a training's run"
        raise WrongDestination(what, f'"{destination}"', remedy)
