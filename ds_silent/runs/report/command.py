"""``ds-silent report``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ds_silent.runs.report.page import write_report
from ds_silent.runs.run import ReadingError


def report_command(runs: Sequence[str], output: str | None) -> int:
    """The exit status: 0 the page is there, whatever it says; 2 it is not."""
    try:
        path, verdicts = write_report(runs, output)
    except ReadingError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return 2
    for verdict in verdicts[:1] if len(verdicts) == 1 else ():
        print(_plain(verdict.sentence))
    if len(verdicts) > 1:
        wrong = sum(verdict.severity in ("error", "warning") for verdict in verdicts)
        print(f"{len(verdicts)} runs, {wrong} with an alarm")
    print(f"report: {os.fspath(path)!a}; open it in a browser")
    return 0


def _plain(text: str) -> str:
    return text.encode(sys.stdout.encoding or "utf-8", errors="replace").decode(sys.stdout.encoding or "utf-8")
