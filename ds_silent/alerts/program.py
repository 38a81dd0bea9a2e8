"""A command of the user's, without a shell: the alert is JSON on its standard input.

run_command("/opt/page --team training", {"title": "…"}, seconds=10.0)      # or NotSent

What it prints goes nowhere: it may quote a secret of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from typing import Any

from ds_silent.alerts.failure import NotSent, why_of


def run_command(command: str, body: Any, seconds: float) -> None:
    """Raises:
    NotSent: it cannot be started, does not end in time (it is killed then), or its exit status is not 0.
    """
    nowhere = subprocess.DEVNULL
    try:
        # A session of its own, so that what the command has started ends with it, and no Ctrl-C of the training's.
        started = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
    except OSError as error:
        raise NotSent(f"the command cannot be started: {why_of(error)}", again=False) from None
    try:
        started.communicate(json.dumps(body).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        raise NotSent(f"the command did not end within {seconds:g} s") from None
    except OSError as error:
        raise NotSent(f"the command could not be told: {why_of(error)}") from None
    if started.returncode:
        raise NotSent(f"the command ended with status {started.returncode}")
