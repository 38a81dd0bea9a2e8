"""From runs to one page that needs nothing else.

html = page_of([run, other])             # pure
write_report(["runs/my-run"])      # beside its records
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ds_silent.runs import RunRecords, RunVerdict, read_run, verdict_of
from ds_silent.runs.report import heat
from ds_silent.runs.report.figures import CURVES, FURTHER, Panel, View, scores, view_of
from ds_silent.runs.report.tables import (
    Preflight,
    Repaired,
    Row,
    event_rows,
    facts_of,
    preflight_of,
    repairs_of,
    timeline,
)
from ds_silent.runs.run import ReadingError, find_runs

MOST_RUNS = 12
"""Of one page."""
PAGE = "report.html"


_SENTENCE = re.compile(r"(?<=[^.\d][.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Topic:
    """One question, and what each run has to say to it."""

    name: str
    title: str
    about: str
    panels: tuple[tuple[int, str, Panel], ...]  # number of the run, caption, drawing
    small: bool = False  # several beside each other

    @property
    def wide(self) -> bool:
        """Whether one of them is tall, and wants all the room there is."""
        return any(panel.wide for _, _, panel in self.panels)


@dataclass(frozen=True)
class RunPart:
    """What stands once for each run."""

    number: int
    name: str
    verdict: RunVerdict
    facts: tuple[tuple[str, str], ...]
    timeline: Panel | None
    events: tuple[Row, ...]  # that disturb
    notes: tuple[Row, ...]  # that do not
    preflight: Preflight | None
    repairs: tuple[Repaired, ...]
    matrices: tuple[Any, ...]
    block: str
    problems: tuple[str, ...]


def page_of(runs: Sequence[RunRecords], title: str = "") -> str:
    """HTML. Takes whatever the records hold."""
    views = [view_of(run, verdict_of(run)) for run in runs]
    parts = [_part(number, view) for number, view in enumerate(views)]
    topics = _topics(views)
    figures, numbers = _numbered(parts, topics)
    template = _environment().get_template("page.html")
    return template.render(
        title=title or _title(parts),
        parts=parts,
        topics=topics,
        headline=_headline(parts),
        worst=_worst(parts),
        number=lambda panel: numbers[id(panel)],
        data=_data(views, parts, figures),
        style=Markup(_text("page.css")),  # ours
        script=Markup(_text("page.js")),
        policy=_policy(),
        several=len(parts) > 1,
    )


def write_report(directories: Sequence[str | Path], output: str | Path | None = None) -> tuple[Path, list[RunVerdict]]:
    """Read the runs below these directories and write the page; its path, and the verdicts.

    Args:
        output: where it goes; None: ``report.html`` in the directory, or in the nearest one that has them all.

    Raises:
        ReadingError: there is nothing to read, or the page cannot be written.
    """
    found = [path for directory in directories for path in find_runs(directory)]
    kept = list(dict.fromkeys(found))
    if len(kept) > MOST_RUNS:
        raise ReadingError(
            f"there are {len(kept)} runs below {', '.join(ascii(os.fspath(d)) for d in directories)}, and a page holds "
            f"at most {MOST_RUNS}; name those that you want to see"
        )
    runs = [read_run(path) for path in kept]
    path = _beside(directories) / PAGE if output is None else Path(output)
    _write(path, page_of(runs))
    return path, [verdict_of(run) for run in runs]


def _beside(directories: Sequence[str | Path]) -> Path:
    if len(directories) == 1:
        return Path(directories[0])
    return Path(os.path.commonpath([os.path.abspath(directory) for directory in directories]))


def _write(path: Path, text: str) -> None:
    """As a whole or not at all: a report may be read while it is made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReadingError(
            f"the report cannot be written to {os.fspath(path)!a} ({reason}); choose another -o"
        ) from None


def _part(number: int, view: View) -> RunPart:
    run = view.run
    rows = event_rows(view)
    return RunPart(
        number,
        run.name,
        view.verdict,
        facts_of(view),
        timeline(view),
        tuple(row for row in rows if row.severity != "info"),
        tuple(row for row in rows if row.severity == "info"),
        preflight_of(run),
        repairs_of(run),
        tuple(heat.matrices(view)),
        json.dumps(run.facts.get("block"), indent=1, default=str)[:20_000] if run.facts.get("block") else "",
        tuple(run.problems),
    )


_REDUCED, _BEHIND = FURTHER[:1], FURTHER[1:]


def _topics(views: Sequence[View]) -> list[Topic]:
    topics = [_topic(views, *one) for one in (*CURVES, *_REDUCED)]
    tables = [heat.rank_tables(view) for view in views]
    rows = [heat.shown_ranks(view, table) for view, table in zip(views, tables, strict=True)]
    for name in ("norm", "cosine", "loss"):
        title, about = {
            "norm": ("Gradient norm, rank by rank", "How far each rank's norm is from the median of all."),
            "cosine": ("Direction, rank by rank", "How far each rank's cosine is from the median of all."),
            "loss": ("Loss, rank by rank", "How far each rank's loss is from the median of all."),
        }[name]
        drawn = [heat.rank_heat(view, name, tables[n], rows[n]) for n, view in enumerate(views)]
        topics.append(_collected(f"ranks-{name}", title, about, drawn))
    topics += [_topic(views, *one) for one in _BEHIND[:1]]
    near = [(n, title, panel) for n, view in enumerate(views) for title, panel in scores(view)]
    about = "Score over threshold, nearest first. Below 1, the line, chance explains it; above, own rows may."
    topics.append(Topic("scores", "How near each detector was", about, tuple(near), small=True))
    topics += [_topic(views, *one) for one in _BEHIND[1:]]
    for which, title in ((0, "Layers: dispersion of the norm"), (1, "Layers: mean cosine")):
        drawn = [heat.layer_heat(view, which) for view in views]
        topics.append(_collected(f"layers-{which}", title, "Of each layer, over the ranks.", drawn))
    return [topic for topic in topics if topic.panels]


def _topic(views: Sequence[View], name: str, title: str, about: str, draw: Any) -> Topic:
    return _collected(name, title, about, [draw(view) for view in views])


def _collected(name: str, title: str, about: str, drawn: Sequence[Panel | None]) -> Topic:
    panels = tuple((number, "", panel) for number, panel in enumerate(drawn) if panel is not None)
    return Topic(name, title, about, panels)


def _numbered(parts: Sequence[RunPart], topics: Sequence[Topic]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """What hovering over each drawing shows, and the place of each panel (by its id) among them."""
    drawn = [(part.number, "Events", part.timeline) for part in parts if part.timeline is not None]
    for topic in topics:
        drawn += [
            (number, f"{topic.title}{': ' if caption else ''}{caption}", panel)
            for number, caption, panel in topic.panels
        ]
    figures = [{"run": number, "title": title, **panel.figure.data} for number, title, panel in drawn]
    return figures, {id(panel): place for place, (_, _, panel) in enumerate(drawn)}


def _data(views: Sequence[View], parts: Sequence[RunPart], figures: list[dict[str, Any]]) -> Markup:
    """For the script: JSON that can stand in a page."""
    axes = [
        {"name": view.run.name, "low": view.axis.low, "high": view.axis.high, "steps": view.axis.steps()}
        for view in views
    ]
    matrices = [[figure.data for _, _, figure in part.matrices] for part in parts]
    since = next((part.verdict.since for part in parts if part.verdict.since), None)
    held = {"axes": axes, "figures": figures, "matrices": matrices, "since": since}
    text = json.dumps(held, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # nothing in it can end the element


def gist(message: str) -> str:
    """Its first sentence, and what it names as the likeliest cause."""
    first = _SENTENCE.split(message)[0]
    _, found, rest = message[len(first) :].partition(" Most likely")  # before it may stand a number and its full stop
    return f"{first}{found}{_SENTENCE.split(rest)[0]}"


def _title(parts: Sequence[RunPart]) -> str:
    return f"{_headline(parts)} · ds_silent"


def _worst(parts: Sequence[RunPart]) -> str:
    order = ("error", "warning", "unknown", "ok")
    return min((part.verdict.severity for part in parts), key=order.index, default="unknown")


def _headline(parts: Sequence[RunPart]) -> str:
    if len(parts) == 1:
        return parts[0].verdict.sentence
    wrong = sum(part.verdict.severity in ("error", "warning") for part in parts)
    if not wrong:
        return f"No alarm in {len(parts)} runs."
    return f"{wrong} of {len(parts)} runs {'has' if wrong == 1 else 'have'} an alarm."


def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(_text)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["gist"] = gist
    return environment


def _policy() -> str:
    """Nothing from anywhere but this page's own style, script and pictures."""
    style, script = (_hash(_text(name)) for name in ("page.css", "page.js"))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _text(name: str) -> str:
    return resources.files("ds_silent.runs.report").joinpath(name).read_text(encoding="utf-8")
