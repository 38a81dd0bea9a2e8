"""``ds-silent watch``: what is typed, and how it ends.

status = watch_command("runs/my-run", once=True, as_json=False, stale=None, every=1.0)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ds_silent.watch.live import look, silence_stdout
from ds_silent.watch.once import WORDS, status_of, told_json, told_lines
from ds_silent.watch.watched import Watched

WRONG, INTERRUPTED = 2, 130
"""Exit statuses of a mistake in what was typed, and of a program that Ctrl-C has ended."""


def watch_command(run: str, once: bool, as_json: bool, stale: float | None, every: float) -> int:
    """Show a run; its exit status, see :mod:`ds_silent.watch.once`.

    Args:
        run: the directory; it may come later, where somebody looks on.
        once: print and end; also where the output is no terminal.
        stale: minutes without a record after which a run counts as one that hangs.
        every: seconds between two looks at the files.
    """
    seconds = None if stale is None else 60.0 * stale
    if Path(run).is_file():
        print(f"ds-silent: {run!a} is a file; give a directory, the output_dir of a run", file=sys.stderr)
        return WRONG
    try:
        if once or as_json or not sys.stdout.isatty():
            return _once(Watched(run), as_json, seconds)
        return status_of(look(Watched(run), run, every), seconds, time.time())
    except KeyboardInterrupt:
        return INTERRUPTED


def _once(watched: Watched, as_json: bool, stale: float | None) -> int:
    while watched.poll():
        pass
    view, now = watched.view(), time.time()
    status = status_of(view, stale, now)
    if as_json:
        text = json.dumps(told_json(view, stale, now), allow_nan=False, indent=1)
    else:
        text = "\n".join([*told_lines(view, now), f"status: {WORDS[status]}"])
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    except OSError:  # whoever was to read it has left
        silence_stdout()
    return status
