"""A command that measures for a while: how it shows its progress, what it leaves behind, and how its mistakes end.

Shared by ``ds-silent drill`` and ``ds-silent numerics``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from ds_silent.config import ConfigError
from ds_silent.practice.ranks import RankBroke
from ds_silent.text import mistake, unwritten

WIDTH = 120  # of what goes into a file or a pipe
Result = TypeVar("Result")
Heard = Callable[[str], None]
"""Called with the name of each part that has ended."""


def write_json(path: str | None, value: Any) -> None:
    """``value`` holds JSON's own types and finite numbers; without a path nothing is written."""
    if path is not None:
        Path(path).write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def console_of_stdout() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def carried_out(
    measure: Callable[[Heard], Result],
    show: Callable[[Result, Console], None],
    to_json: Callable[[Result], Any],
    judge: Callable[[Result], int],
    json_path: str | None,
) -> int:
    """Measure, and print the report on standard output; a mistake is one sentence on standard error.

    Returns:
        the exit status: 1 where a process broke (``measure`` raises ``RankBroke``), 2 for a mistake of the user
        (``ConfigError``), else what ``judge`` says.
    """
    console, path = console_of_stdout(), json_path
    if path is not None and (os.path.isdir(path) or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)):
        return mistake(f"--json {path!a} cannot be written; give a file in a directory that can")  # minutes before
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("starting", total=None)
            result = measure(lambda name: progress.update(task, description=f"{ascii(name)[1:-1]} ended", advance=1))
    except ConfigError as error:
        return mistake(error)
    except RankBroke as error:
        mistake(f"a process broke, so nothing can be said: {error}")
        return 1
    show(result, console)
    try:
        write_json(json_path, to_json(result))
    except OSError as error:  # a full disk, a file that is not ours
        return unwritten(error)
    return judge(result)
