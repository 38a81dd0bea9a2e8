"""Make one page of some runs, or of a comparison, that needs nothing else; and ``ds-silent report``.

html = page_of([run, other])             # pure
write_report(["runs/my-run"])            # beside its records
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from ds_silent.comparison.output import COLUMNS, STATES, cells, lists_of
from ds_silent.comparison.result import PHRASES, LinkResult, TrainingComparison
from ds_silent.runs.lines import METRICS, Metric
from ds_silent.runs.report import figures, heat, tables
from ds_silent.runs.report.axis import Axis, binned
from ds_silent.runs.report.figures import PlotContext, plot_context
from ds_silent.runs.report.svg import Mark, Panel, Series, chart
from ds_silent.runs.run import ReadingError, RunRecords, find_runs, read_run
from ds_silent.runs.verdict import RunVerdict, verdict_of
from ds_silent.text import mistake, one_line, printable

MOST_RUNS = 12
"""Of one page."""
PAGE = "report.html"
_SIGNS = {"error": "✕", "warning": "!", "ok": "✓", "unknown": "?", "info": "i"}
_OURS = {"style": "page.css", "script": "page.js"}
_SENTENCE = re.compile(r"(?<=[^.\d][.!?])\s+(?=[A-Z])")
_BY_RANK: tuple[Metric, ...] = ("norm", "cosine", "loss")
Drawn = Panel | list[tuple[str, Panel]] | None
"""One drawing of a run, or several with their captions."""


class Topic(NamedTuple):
    """One question, and what each run has to say to it."""

    name: str
    title: str
    about: str
    panels: list[tuple[int, str, Panel]]  # number of the run, caption, drawing


def page_of(runs: Sequence[RunRecords]) -> str:
    """Return the page of these runs, whatever their records hold."""
    views = [plot_context(run, verdict_of(run)) for run in runs]
    parts = [_part(number, view) for number, view in enumerate(views)]
    topics = _topics(views)
    drawn = [(part["number"], "Events", part["timeline"]) for part in parts if part["timeline"] is not None]
    for topic in topics:
        drawn += [(n, f"{topic.title}{': ' if caption else ''}{caption}", panel) for n, caption, panel in topic.panels]
    numbers = {id(panel): place for place, (_, _, panel) in enumerate(drawn)}
    headline = _headline([view.verdict for view in views])
    order = ("error", "warning", "unknown", "ok")
    return _rendered(
        "page.html",
        "style",
        "script",
        title=f"{headline} · ds_silent",
        parts=parts,
        topics=topics,
        headline=headline,
        worst=min((view.verdict.severity for view in views), key=order.index, default="unknown"),
        number=lambda panel: numbers[id(panel)],
        data=_data(views, parts, [{"run": number, "title": title, **panel.data} for number, title, panel in drawn]),
        several=len(parts) > 1,
    )


def write_report(directories: Sequence[str | Path], output: str | Path | None = None) -> tuple[Path, list[RunVerdict]]:
    """Read the runs below these directories and write the page; return its path and the verdicts.

    Args:
        output: its path; None: ``report.html`` in the directory, or in the nearest one that holds them all.

    Raises:
        ReadingError: there is nothing to read, or the page cannot be written.
    """
    found = list(dict.fromkeys(path for directory in directories for path in find_runs(directory)))
    if len(found) > MOST_RUNS:
        raise ReadingError(
            f"there are {len(found)} runs below {', '.join(ascii(os.fspath(d)) for d in directories)}, and a page "
            f"holds at most {MOST_RUNS}; name those that you want to see"
        )
    runs, beside = [read_run(path) for path in found], directories[0]
    if len(directories) > 1:
        beside = os.path.commonpath([os.path.abspath(one) for one in directories])
    path = Path(beside) / PAGE if output is None else Path(output)
    _write(path, page_of(runs))
    return path, [verdict_of(run) for run in runs]


def report_command(runs: Sequence[str], output: str | None) -> int:
    """Return the exit status: 0 the page was written, whatever it says; 2 it was not."""
    try:
        path, verdicts = write_report(runs, output)
    except ReadingError as error:
        return mistake(error)
    said = verdicts[0].sentence
    if len(verdicts) > 1:
        said = f"{len(verdicts)} runs, {sum(one.severity in ('error', 'warning') for one in verdicts)} with an alarm"
    print(printable(said))
    print(f"report: {os.fspath(path)!a}; open it in a browser")
    return 0


def _write(path: Path, text: str) -> None:
    """Write the whole page or nothing: a report may be read while it is made again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:
            file = Path(beside) / path.name
            file.write_bytes(text.encode("utf-8", errors="replace"))
            file.replace(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sentence = f"the report cannot be written to {os.fspath(path)!a} ({reason}); choose another -o"
        raise ReadingError(sentence) from None


def _part(number: int, view: PlotContext) -> dict[str, Any]:
    """Return what the page says of each run."""
    run, rows = view.run, tables.event_rows(view)
    block = run.facts.get("block")
    return {
        "number": number,
        "name": run.name,
        "verdict": view.verdict,
        "facts": tables.facts_of(view),
        "timeline": tables.timeline(view),
        "events": [row for row in rows if row.severity != "info"],  # that disturb
        "notes": [row for row in rows if row.severity == "info"],
        "preflight": tables.preflight_of(run),
        "settings": tables.settings_of(run),
        "repairs": tables.repairs_of(run),
        "objective": tables.objective_of(run),
        "matrices": heat.matrices(view),
        "block": json.dumps(block, indent=1, default=str)[:20_000] if block else "",
        "problems": run.problems,
    }


def _topics(views: Sequence[PlotContext]) -> list[Topic]:
    by_rank = [heat.rank_heats(view) for view in views]
    of_direction = "Cosine of each rank's gradient with the mean of the others."
    of_reduction = "Distance of the reduced gradient from the mean of the ranks' gradients."
    drawn: list[tuple[str, str, str, Iterable[Drawn]]] = [
        ("loss", "Loss", "Of each rank's own rows.", map(figures.loss, views)),
        ("norm", "Gradient norm", "Of each rank's own gradient, before the reduction.", map(figures.norm, views)),
        ("cosine", "Gradient direction", of_direction, map(figures.cosine, views)),
        ("integrity", "Is the reduction right?", of_reduction, map(figures.integrity, views)),
    ]
    for metric in _BY_RANK:
        heading, about = METRICS[metric].heading, f"How far each rank's {metric} is from the median of all."
        found = [heats.get(metric) for heats in by_rank]
        drawn.append((f"ranks-{metric}", f"{heading}, rank by rank", about, found))
    of_scores = "Score over threshold, nearest first. Below 1, the line, chance explains it; above, own rows may."
    of_noise = "The batch, in samples, beyond which more data parallelism hardly helps."
    of_layers = "Of each layer, over the ranks."
    dispersions, cosines = ([heat.layer_heat(view, which) for view in views] for which in (0, 1))
    drawn += [
        ("noise", "Noise scale", of_noise, map(figures.noise_scale, views)),
        ("scores", "How near each detector was", of_scores, map(figures.scores, views)),
        ("coverage", "Rows", "What the ranks have taken of the epoch.", map(figures.coverage, views)),
        ("cost", "What observing costs", "Wall time of the writing rank, in seconds.", map(figures.cost, views)),
        ("layers-0", "Layers: dispersion of the norm", of_layers, dispersions),
        ("layers-1", "Layers: mean cosine", of_layers, cosines),
    ]
    topics = []
    for name, title, about, of_runs in drawn:
        panels = [
            (number, caption, panel)
            for number, found in enumerate(of_runs)
            for caption, panel in (found if isinstance(found, list) else [("", found)])
            if panel is not None
        ]
        topics.append(Topic(name, title, about, panels))
    return [topic for topic in topics if topic.panels]


def _data(views: Sequence[PlotContext], parts: Sequence[dict[str, Any]], drawn: list[dict[str, Any]]) -> Markup:
    """Return the script's numbers as JSON that can stand in a page."""
    shared = [(one.run.name, one.axis) for one in views]
    axes = [{"name": name, "low": axis.low, "high": axis.high, "steps": axis.steps()} for name, axis in shared]
    matrices = [[panel.data for _, panel in part["matrices"]] for part in parts]
    since = next((view.verdict.since for view in views if view.verdict.since), None)
    numbers = {"axes": axes, "figures": drawn, "matrices": matrices, "since": since}
    text = json.dumps(numbers, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # nothing in it can end the element


def gist(message: str) -> str:
    """Return a message's first sentence and what it names as the likeliest cause."""
    first = _SENTENCE.split(message)[0]
    _, found, rest = message[len(first) :].partition(" Most likely")  # before it may stand a number and its full stop
    return f"{first}{found}{_SENTENCE.split(rest)[0]}"


def _headline(verdicts: Sequence[RunVerdict]) -> str:
    if len(verdicts) == 1:
        return verdicts[0].sentence
    wrong = sum(verdict.severity in ("error", "warning") for verdict in verdicts)
    if not wrong:
        return f"No alarm in {len(verdicts)} runs."
    return f"{wrong} of {len(verdicts)} runs {'has' if wrong == 1 else 'have'} an alarm."


# -- A comparison of two trainings: only what differs, and each link's curve with what rounding allows -----------------


def comparison_page(found: TrainingComparison) -> str:
    """Return the page; its text is escaped, and it holds no script."""
    drawn = (one for one in found.links if one.link not in ("rows", "rates"))
    differing = [one for one in drawn if any(size > 0.0 for _, size, _ in one.curve)]
    return _rendered(
        "comparison.html",
        "style",
        title=f"{'Parted' if found.parted else 'Not parted'} · ds_silent compare",
        worst="error" if found.parted else "ok",
        headline=one_line(found.sentence),
        runs=[("A", one_line(found.a)), ("B", one_line(found.b))],
        columns=COLUMNS,
        rows=[(one.state, cells(one)) for one in found.links],
        lists=lists_of(found),
        same=[PHRASES[one.link] for one in found.links if one.state == "equal"],
        panels=[(PHRASES[one.link], STATES[one.state], _differences(one, found.step)) for one in differing],
    )


def _differences(one: LinkResult, parted: int | None) -> Markup:
    """Draw the differences and what was allowed, on a logarithmic scale; what is 0 is not drawn."""
    steps = np.array([step for step, *_ in one.curve], dtype=np.int64)
    values = np.array([both for _, *both in one.curve], dtype=np.float64)
    axis = Axis.of(steps)
    size, allowed = (binned(axis, steps, np.where(column > 0.0, column, np.nan)) for column in values.T)
    series = [Series("difference", size, tone="a"), Series("allowed", allowed, "dash", tone="quiet")]
    marks = [] if parted is None else [Mark(parted, "error")]
    return chart(axis, series, f"{PHRASES[one.link]}: relative difference by step", log=True, marks=marks).markup


# -- What both pages are made of ---------------------------------------------------------------------------------------


def _rendered(template: str, *kinds: str, **values: Any) -> str:
    """Return the page of a template, with our style, and perhaps our script.

    All that it is given is escaped, and nothing may be missing. Its policy admits these two and pictures alone.
    """
    ours = {kind: _text_of(_OURS[kind]) for kind in kinds}
    hashes = {kind: base64.b64encode(hashlib.sha256(text.encode()).digest()) for kind, text in ours.items()}
    sources = "; ".join(f"{kind}-src 'sha256-{digest.decode('ascii')}'" for kind, digest in hashes.items())
    policy = f"default-src 'none'; {sources}; img-src data:; base-uri 'none'; form-action 'none'"
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_text_of),
    )
    environment.filters["gist"] = gist
    environment.globals["signs"] = _SIGNS
    safe = {kind: Markup(text) for kind, text in ours.items()}
    return environment.get_template(template).render(policy=policy, **safe, **values)


def _text_of(name: str) -> str:
    return resources.files("ds_silent.runs.report").joinpath(name).read_text(encoding="utf-8")
