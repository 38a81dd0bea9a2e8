"""Make one page of some runs that needs nothing else; and ``ds-silent report``.

html = page_of([run, other])             # pure
write_report(["runs/my-run"])            # beside its records
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ds_silent.runs.events import EventGroup
from ds_silent.runs.lines import Metric
from ds_silent.runs.report import figures, heat, tables
from ds_silent.runs.report.figures import PlotContext, plot_context
from ds_silent.runs.report.svg import Panel
from ds_silent.runs.run import ReadingError, RunRecords, find_runs, read_run
from ds_silent.runs.verdict import RunVerdict, verdict_of

MOST_RUNS = 12
"""Of one page."""
PAGE = "report.html"
_SENTENCE = re.compile(r"(?<=[^.\d][.!?])\s+(?=[A-Z])")
_BY_RANK: tuple[Metric, ...] = ("norm", "cosine", "loss")


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
        """Whether one of them wants all the room there is."""
        return any(panel.wide for _, _, panel in self.panels)


@dataclass(frozen=True)
class RunPart:
    """What the page says of each run."""

    number: int
    name: str
    verdict: RunVerdict
    facts: tuple[tuple[str, str], ...]
    timeline: Panel | None
    events: tuple[tables.FaultRow, ...]  # that disturb
    notes: tuple[tables.FaultRow, ...]  # that do not
    preflight: tables.PreflightTable | None
    repairs: list[EventGroup]
    matrices: list[tuple[int, Panel]]
    block: str
    problems: tuple[str, ...]


def page_of(runs: Sequence[RunRecords], title: str = "") -> str:
    """Return the page of these runs, whatever their records hold."""
    views = [plot_context(run, verdict_of(run)) for run in runs]
    parts = [_part(number, view) for number, view in enumerate(views)]
    topics = _topics(views)
    drawn, numbers = _numbered(parts, topics)
    template = _environment().get_template("page.html")
    return template.render(
        title=title or f"{_headline(parts)} · ds_silent",
        parts=parts,
        topics=topics,
        headline=_headline(parts),
        worst=_worst(parts),
        number=lambda panel: numbers[id(panel)],
        data=_data(views, parts, drawn),
        style=Markup(_text("page.css")),  # ours
        script=Markup(_text("page.js")),
        policy=_policy(),
        several=len(parts) > 1,
    )


def write_report(directories: Sequence[str | Path], output: str | Path | None = None) -> tuple[Path, list[RunVerdict]]:
    """Read the runs below these directories and write the page; return its path and the verdicts.

    Args:
        output: its path; None: ``report.html`` in the directory, or in the nearest one that holds them all.

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


def report_command(runs: Sequence[str], output: str | None) -> int:
    """Return the exit status: 0 the page was written, whatever it says; 2 it was not."""
    try:
        path, verdicts = write_report(runs, output)
    except ReadingError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return 2
    said = verdicts[0].sentence
    if len(verdicts) > 1:
        said = f"{len(verdicts)} runs, {sum(one.severity in ('error', 'warning') for one in verdicts)} with an alarm"
    encoding = sys.stdout.encoding or "utf-8"
    print(said.encode(encoding, errors="replace").decode(encoding))
    print(f"report: {os.fspath(path)!a}; open it in a browser")
    return 0


def _beside(directories: Sequence[str | Path]) -> Path:
    several = len(directories) > 1
    return Path(os.path.commonpath([os.path.abspath(one) for one in directories]) if several else directories[0])


def _write(path: Path, text: str) -> None:
    """Write the whole page or nothing: a report may be read while it is made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
            file.write(text.encode("utf-8", errors="replace"))
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sentence = f"the report cannot be written to {os.fspath(path)!a} ({reason}); choose another -o"
        raise ReadingError(sentence) from None


def _part(number: int, view: PlotContext) -> RunPart:
    run = view.run
    rows = tables.event_rows(view)
    return RunPart(
        number,
        run.name,
        view.verdict,
        tables.facts_of(view),
        tables.timeline(view),
        tuple(row for row in rows if row.severity != "info"),
        tuple(row for row in rows if row.severity == "info"),
        tables.preflight_of(run),
        tables.repairs_of(run),
        heat.matrices(view),
        json.dumps(run.facts.get("block"), indent=1, default=str)[:20_000] if run.facts.get("block") else "",
        tuple(run.problems),
    )


def _topics(views: Sequence[PlotContext]) -> list[Topic]:
    topics: list[Topic] = []

    def add(name: str, title: str, about: str, drawn: Iterable[Panel | None]) -> None:
        panels = tuple((number, "", panel) for number, panel in enumerate(drawn) if panel is not None)
        topics.append(Topic(name, title, about, panels))

    about = "Of each rank's own rows."
    add("loss", "Loss", about, map(figures.loss, views))
    about = "Of each rank's own gradient, before the reduction."
    add("norm", "Gradient norm", about, map(figures.norm, views))
    about = "Cosine of each rank's gradient with the mean of the others."
    add("cosine", "Gradient direction", about, map(figures.cosine, views))
    about = "Distance of the reduced gradient from the mean of the ranks' gradients."
    add("integrity", "Is the reduction right?", about, map(figures.integrity, views))
    by_rank = [heat.rank_tables(view) for view in views]
    rows = [heat.shown_ranks(view, held) for view, held in zip(views, by_rank, strict=True)]
    for metric in _BY_RANK:
        about = f"How far each rank's {metric} is from the median of all."
        drawn = [heat.rank_heat(view, metric, by_rank[n], rows[n]) for n, view in enumerate(views)]
        add(f"ranks-{metric}", f"{heat.WORDS[metric][0]}, rank by rank", about, drawn)
    about = "The batch, in samples, beyond which more data parallelism hardly helps."
    add("noise", "Noise scale", about, map(figures.noise_scale, views))
    near = tuple((n, title, panel) for n, view in enumerate(views) for title, panel in figures.scores(view))
    about = "Score over threshold, nearest first. Below 1, the line, chance explains it; above, own rows may."
    topics.append(Topic("scores", "How near each detector was", about, near, small=True))
    about = "What the ranks have taken of the epoch."
    add("coverage", "Rows", about, map(figures.coverage, views))
    about = "Wall time of the writing rank, in seconds."
    add("cost", "What observing costs", about, map(figures.cost, views))
    for which, title in ((0, "Layers: dispersion of the norm"), (1, "Layers: mean cosine")):
        add(
            f"layers-{which}", title, "Of each layer, over the ranks.", [heat.layer_heat(view, which) for view in views]
        )
    return [topic for topic in topics if topic.panels]


def _numbered(parts: Sequence[RunPart], topics: Sequence[Topic]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return what hovering over each drawing shows, and the place of each panel (by its id) among them."""
    drawn = [(part.number, "Events", part.timeline) for part in parts if part.timeline is not None]
    for topic in topics:
        drawn += [(n, f"{topic.title}{': ' if caption else ''}{caption}", panel) for n, caption, panel in topic.panels]
    shown = [{"run": number, "title": title, **panel.data} for number, title, panel in drawn]
    return shown, {id(panel): place for place, (_, _, panel) in enumerate(drawn)}


def _data(views: Sequence[PlotContext], parts: Sequence[RunPart], drawn: list[dict[str, Any]]) -> Markup:
    """Return the script's numbers as JSON that can stand in a page."""
    axes = [
        {"name": one.run.name, "low": one.axis.low, "high": one.axis.high, "steps": one.axis.steps()} for one in views
    ]
    matrices = [[panel.data for _, panel in part.matrices] for part in parts]
    since = next((part.verdict.since for part in parts if part.verdict.since), None)
    held = {"axes": axes, "figures": drawn, "matrices": matrices, "since": since}
    text = json.dumps(held, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # nothing in it can end the element


def gist(message: str) -> str:
    """Return a message's first sentence and what it names as the likeliest cause."""
    first = _SENTENCE.split(message)[0]
    _, found, rest = message[len(first) :].partition(" Most likely")  # before it may stand a number and its full stop
    return f"{first}{found}{_SENTENCE.split(rest)[0]}"


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
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["gist"] = gist
    return environment


def _policy() -> str:
    """Return a policy that admits this page's own style, script and pictures alone."""
    digests = (hashlib.sha256(_text(name).encode()).digest() for name in ("page.css", "page.js"))
    style, script = (f"sha256-{base64.b64encode(digest).decode('ascii')}" for digest in digests)
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _text(name: str) -> str:
    return resources.files("ds_silent.runs.report").joinpath(name).read_text(encoding="utf-8")
