"""A comparison as people, programs and test runners read it.

print_comparison(found, console)
write_json(found, "compare.json"); write_junit(found, "compare.xml")
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_silent.comparison.result import PHRASES, LinkResult, TrainingComparison
from ds_silent.json_form import to_json
from ds_silent.text import one_line, printable

MOST_LINES = 12
"""Settings, and things that were left out, that are printed; the JSON has all."""
STATES = {
    "equal": "the same", "rounding": "within rounding", "parts": "parts", "follows": "follows",
    "unknown": "not compared",
}  # fmt: skip
COLUMNS = ("link", "verdict", "step", "steps", "equal", "largest", "of allowed")


def lists_of(found: TrainingComparison) -> dict[str, list[str]]:
    """Return what is listed below the table, by title; without what is empty."""
    settings = [one.sentence for one in found.settings if not one.shares]
    lists = {"Settings that differ": settings, "Versions that differ": found.versions, "Left out": found.left_out}
    return {title: [one_line(line) for line in lines] for title, lines in lists.items() if lines}


def say(console: Console, line: str) -> None:
    """Print one line, whatever names and sentences from outside hold."""
    console.print(Text(printable(one_line(line))), soft_wrap=True)


def print_comparison(found: TrainingComparison, console: Console, brief: bool = False) -> None:
    """Print the answer, and behind it the table, the settings and what was left out; ``brief``: the answer alone."""
    say(console, found.sentence)
    if brief:
        return
    say(console, f"A: {found.a}")
    say(console, f"B: {found.b}")
    console.print(_table(found))
    for title, lines in lists_of(found).items():
        console.print(f"{title}:")
        for line in lines[:MOST_LINES]:
            say(console, f"  {line}")
        if len(lines) > MOST_LINES:
            console.print(f"  and {len(lines) - MOST_LINES} more")


def _table(found: TrainingComparison) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("link", "verdict") else "right")
    for one in found.links:
        table.add_row(*cells(one), style="bold red" if one.state == "parts" else None)
    return table


def cells(one: LinkResult) -> tuple[str, ...]:
    """Return a row of the table, see :data:`COLUMNS`."""
    if one.state == "unknown":
        return PHRASES[one.link], STATES[one.state], "", "", "", "", ""
    step = "" if one.step is None else str(one.step)
    exact = one.link in ("rows", "rates")
    largest = "" if exact or not one.largest else f"{one.largest:.2g}"
    share = f"{float(f'{one.share:.2g}'):,.0f} times" if 10.0 <= one.share < math.inf else f"{one.share:.0%}"
    share = "" if exact or not one.share else share
    return PHRASES[one.link], STATES[one.state], step, str(one.compared), str(one.equal), largest, share


def write_json(found: TrainingComparison, path: str | Path) -> None:
    """Write every field of the comparison but the curves; a non-finite number is a string."""
    value = to_json(found)
    for link in value["links"]:
        del link["curve"]
    Path(path).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_junit(found: TrainingComparison, path: str | Path) -> None:
    """Write one test case per link, as CI systems show them; what follows from a parting is skipped."""
    cases = [one for one in found.links if found.link != "settings"]
    suite = ElementTree.Element("testsuite", name="ds-silent compare", errors="0")
    failed = skipped = 0
    for link in ("settings", *(one.link for one in cases)):
        case = ElementTree.SubElement(suite, "testcase", classname="ds_silent.compare", name=PHRASES[link])
        state = next((one.state for one in cases if one.link == link), "equal")
        if link == found.link:
            failed += 1
            failure = ElementTree.SubElement(case, "failure", message=_xml(found.sentence))
            failure.text = _xml("\n".join(found.left_out))
        elif state in ("follows", "unknown"):
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=STATES[state])
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failed))
    suite.set("skipped", str(skipped))
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """What XML may hold: no control character, no half of a pair, whatever a name was."""
    return re.sub("[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", " ", text)
