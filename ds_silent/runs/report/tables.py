"""Tables of a run: events, facts, the preflight; and the events on a line of time. Pure."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from markupsafe import escape

from ds_silent.runs.columns import finite
from ds_silent.runs.events import SEVERITIES, EventGroup, causes_first
from ds_silent.runs.lines import number, of, text, whole
from ds_silent.runs.report.axis import shown
from ds_silent.runs.report.figures import PlotContext
from ds_silent.runs.report.svg import Panel, drawing
from ds_silent.runs.run import RunRecords

MOST_ROWS = 300
_TIMELINE = 24
_ROW = 18


class FaultRow(NamedTuple):
    """One fault, as texts."""

    kind: str
    severity: str
    who: str
    when: str
    step: int
    message: str
    remedy: str = ""
    where: str = ""
    figures: str = ""
    times: int = 1


def event_rows(view: PlotContext) -> list[FaultRow]:
    """Return the faults, causes first; above ``MOST_ROWS``, of which the worst are shown, one row for each kind and
    severity, and all are counted."""
    groups = view.run.events.groups()
    rows = [_row(group, view.run) for group in causes_first(groups[:MOST_ROWS])]
    rest: Counter[tuple[str, str]] = Counter()
    for group in groups[MOST_ROWS:]:
        rest[group.kind, group.severity] += group.count
    for (kind, severity), count in rest.most_common():
        said = f"{count:,} further events."
        rows.append(FaultRow(kind, severity, "several", "see events.jsonl", 0, said, times=count))
    return rows


def _row(group: EventGroup, run: RunRecords) -> FaultRow:
    first, last, spans = group.since, group.until, len(group.spans)
    if group.first == 0 and last == 0:
        when = "before step 1"
    elif first == last:
        when = f"step {first:,}"
    else:
        when = f"steps {first:,} to {last:,}" if group.ended else f"since step {first:,}, last reported at {last:,}"
        when += f" (found at step {group.first:,})" if first < group.first else ""
    when += f", {spans} times" if spans > 1 and last else ""
    named = (("score", group.score), ("threshold", group.threshold if group.score is not None else None))
    figures = ", ".join(f"{name} {shown(value)}" for name, value in named if value is not None)
    said = (group.said, group.remedy, group.where, figures, group.count)
    return FaultRow(group.kind, group.severity, run.who(group), when, first, *said)


def timeline(view: PlotContext) -> Panel | None:
    """Draw a row for each fault, causes first; of many the worst, and further ones share the last row."""
    groups = [group for group in view.run.events.groups() if group.last > 0]
    if not groups:
        return None
    most = _TIMELINE if len(groups) > _TIMELINE + 1 else _TIMELINE + 1
    parts, labels = [], []
    newest = max([*view.run.steps.step[-1:].tolist(), *(one.last for one in groups)])  # an open fault reaches to there
    for at, group in enumerate(causes_first(groups[:most])):
        for n, (first, last, ended) in enumerate(group.spans):
            begin = first if n else min(first, group.since)
            last = newest if group.is_open and n == len(group.spans) - 1 else last
            parts.append(_bar(view.axis.at(begin) * 100, view.axis.at(last) * 100, group.severity, at, ended))
        who = ", ".join(str(rank) for rank in group.ranks[:3]) + ("…" if len(group.ranks) > 3 else "")
        labels.append(f"{group.kind}{f' · {who}' if who and len(group.ranks) < view.run.world_size else ''}"[:26])
    if rest := groups[most:]:
        at = len(labels)
        where: dict[str, set[int]] = {group.severity: set() for group in rest}
        for group in rest:
            where[group.severity] |= {int(view.axis.at(step) * 200) for step in group.steps}
        parts += [_bar(n / 2, n / 2 + 0.5, severity, at) for severity, bins in where.items() for n in sorted(bins)]
        labels.append(f"{sum(group.count for group in rest):,} more events")
    lines, stripes = [], []
    for n, label in enumerate(labels):
        y = (n + 0.5) * _ROW
        lines.append(f'<text class="y" x="-8" y="{y + 4:.0f}">{escape(label)}</text>')
        stripes.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.0f}" y2="{y:.0f}"/>')
    body = "".join([*stripes, *parts, *lines])
    markup = drawing(view.axis, " timeline", "When each fault was there", _ROW * len(labels), body)
    keys = tuple((one, one) for one in SEVERITIES if any(group.severity == one for group in groups))
    return Panel(markup, {"series": []}, "", keys)


def _bar(first: float, last: float, severity: str, row: int, ended: int = 0) -> str:
    y = row * _ROW + 5
    width = f'width="{last - first:.2f}%"' if last - first > 0.6 else 'width="6"'
    x = min(first, 99.2)
    return f'<rect class="span {severity}{" ended" * ended}" x="{x:.2f}%" y="{y}" {width} height="{_ROW - 10}" rx="2"/>'


def facts_of(view: PlotContext) -> tuple[tuple[str, str], ...]:
    """Return what kind of run it is, in a few pairs."""
    run, facts, step = view.run, view.run.facts, view.run.steps.step
    hosts = {place.host for place in run.places.values()}
    stage, batch = whole(of(facts, "training", "ZeRO stage"), 9), view.batch
    framework = " ".join(part for key in ("framework", "framework_version") if (part := text(of(facts, key), 40)))
    measured = f"{len(step):,} step{'s' * (len(step) != 1)}"
    pairs = (
        ("ranks", f"{run.world_size:,}" if run.world_size else "unknown"),
        ("hosts", f"{len(hosts):,}") if len(hosts) > 1 else ("host", "".join(hosts)),
        ("framework", framework and framework + (f", ZeRO {stage}" if stage is not None else "")),
        ("reduced in", text(of(facts, "training", "the dtype of the reduction"), 20)),
        ("data", run.data),
        ("measured", measured + (f", {step[0]:,} to {step[-1]:,}" if len(step) > 1 else "")),
        ("rows a step", "" if batch is None else shown(batch)),
        ("events", ", ".join(f"{count:,} {name}" for name, count in run.events.counts.items() if count) or "none"),
        ("started", text(of(facts, "started"), 40).replace("T", " ").replace("+00:00", " UTC")),
    )
    return tuple((name, value) for name, value in pairs if value)


def settings_of(run: RunRecords) -> tuple[tuple[str, str, str], ...]:
    """Return what the training runs with: name, value, and whose it is; of an older run nothing."""
    settings = run.facts.get("settings")
    if not isinstance(settings, dict):
        return ()
    rows = []
    for name, one in list(settings.items())[:MOST_ROWS]:
        value, origin = of(one, "value"), text(of(one, "from"), 20)
        rows.append((text(name, 120), text(value if isinstance(value, str) else _json(value), 200), origin))
    return tuple(rows)


def _json(value: Any) -> str:
    """Return JSON of 12 digits a number: a rate that was multiplied is 0.0006, and not 0.0006000000000000001."""
    return json.dumps(
        json.loads(json.dumps(value, default=str), parse_float=lambda digits: float(f"{float(digits):.12g}"))
    )


def preflight_of(run: RunRecords) -> dict[str, Any] | None:
    """Return what was compared before step 1; None where nothing was.

    ``wrong``: what is not as expected (name, values, verdict), and how many ``more``; ``passed``: the others, by group.
    """
    items = run.preflight.get("items")
    if not isinstance(items, list):
        return None
    wrong, passed = [], Counter[str]()
    for one in (one for one in items if isinstance(one, dict)):
        if one.get("ok") is True:
            passed[text(one.get("group"), 60) or "other"] += 1
        else:
            name = text(one.get("name"), 200) or "without a name"
            wrong.append((name, _values(one), text(one.get("verdict"), 300)))
    return {
        "wrong": wrong[:100], "more": max(len(wrong) - 100, 0), "passed": passed.most_common(40), "total": len(items)
    }  # fmt: skip


def _values(item: dict[str, Any]) -> str:
    values = item.get("values")
    if not isinstance(values, list):
        return ""
    listed = [text(value, 120) if isinstance(value, str) else shown(number(value)) for value in values[:4]]
    more = f" | and {len(values) - 4:,} more" if len(values) > 4 else ""
    return " | ".join(listed) + more


def objective_of(run: RunRecords) -> str:
    """Return in a sentence how much the labels count; empty where no step was measured."""
    if not len(run.steps):
        return ""
    total = finite(run.steps["label weights"])
    low, high = run.steps["label weight min"], run.steps["label weight max"]
    if not len(total):
        return "How much a label counts is not known: the loss is fused or compiled, or cannot be read on some rank."
    smallest, largest = float(total.min()), float(total.max())
    if largest - smallest > 0.01 * abs(largest):
        said = f"The labels of a step weigh together {shown(smallest)} to {shown(largest)}; a mean's weigh 1."
    elif abs(largest - 1.0) <= 0.01:
        said = "The labels of a step weigh together 1: its gradient is that of a mean."
    else:
        said = f"The labels of a step weigh together {shown(largest)}: its gradient is {shown(largest)} times a mean's."
    with np.errstate(all="ignore"):
        spread = finite(high / low)
    if not len(spread) or spread.min() <= 0.0:
        return said
    most = float(spread.max())
    if most <= 1.01:
        return f"{said} All labels of a step count alike."
    return f"{said} Within a step one label counts up to {shown(most)} times another{_turned(run)}."


def _turned(run: RunRecords) -> str:
    """Return what that costs, at the step at which it costs most; empty where it is not known."""
    angles, errors = run.steps["mean of means angle"], run.steps["mean of means angle error"]
    if not np.isfinite(angles).any():
        return ""
    at = int(np.nanargmax(angles))
    error = f" (± {shown(errors[at])})" if errors[at] > 0.0 else ""
    turned = f"which turns the gradient by up to {shown(angles[at])} degrees{error}"
    return f": ranks do not weigh their labels alike, {turned}"


def repairs_of(run: RunRecords) -> list[EventGroup]:
    """Return what the responses have done and what it cost, as their events say."""
    groups = [group for group in run.events.groups() if group.kind == "repaired"]
    return sorted(groups, key=lambda one: one.first)[:100]
