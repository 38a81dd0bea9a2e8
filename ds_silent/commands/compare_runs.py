"""``ds-silent compare A B [C]``: where two trainings part, in one sentence, and the table behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ds_silent.commands.measuring import write_json as write_as_json
from ds_silent.comparison import ComparisonError, TraceError, compare
from ds_silent.comparison.output import print_comparison, write_json, write_junit
from ds_silent.json_form import to_json
from ds_silent.runs.curves import compare_curves, curves_sentence, print_curves
from ds_silent.runs.run import ReadingError
from ds_silent.text import mistake, printable, unwritten

TOGETHER, PARTED = 0, 1
"""Exit statuses; 2 is a mistake."""
TABLE = 120
"""Columns of a table."""


def compare_command(
    runs: Sequence[str],
    golden: str | None = None,
    tolerance: float | None = None,
    names: str | None = None,
    json_path: str | None = None,
    junit_path: str | None = None,
    brief: bool = False,
    curves: bool = False,
    page: str | None = None,
) -> int:
    """Print the answer and write what was asked for; return the exit status. ``golden``: takes the place of A."""
    given = [*([golden] if golden is not None else []), *runs]
    try:
        if not 2 <= len(given) <= 3:
            takes = "compare takes two runs, A and B, and perhaps a repetition of A"
            if golden is not None:
                takes = "--golden takes the place of A; name B, and perhaps a repetition of the golden run"
            raise ComparisonError(f"{takes}, got {len(runs)}{' runs' * (golden is not None)}")
        if curves:
            return _curves(given, json_path)
        found = compare(*given, tolerance=tolerance, names=names)
        if json_path is not None:
            write_json(found, json_path)
        if junit_path is not None:
            write_junit(found, junit_path)
        if page is not None:
            from ds_silent.runs.report.page import comparison_page  # jinja2, for those who ask for it

            Path(page).write_text(comparison_page(found), encoding="utf-8")
    except (ComparisonError, TraceError, ReadingError) as error:
        return mistake(printable(str(error)))
    except OSError as error:
        return unwritten(error)
    print_comparison(found, _console(), brief)
    return PARTED if found.parted else TOGETHER


def _curves(given: Sequence[str], json_path: str | None) -> int:
    if len(given) != 2:
        raise ComparisonError(f"--curves takes two runs, A and B, got {len(given)}")
    found = compare_curves(given[0], given[1])
    if not found:
        raise ComparisonError("the two runs have measured no step of the same number; compare runs that overlap")
    rows = [{**asdict(one), "blocks": one.blocks, "verdict": one.verdict} for one in found]
    write_as_json(json_path, to_json({"sentence": curves_sentence(found), "curves": rows}))
    print_curves(found, given, _console())
    return TOGETHER


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = TABLE  # of a file or a pipe nobody knows the width
    return console
