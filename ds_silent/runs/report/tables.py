"""Tables of a run: events, facts, the preflight; and the events on a line of time. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from ds_silent.runs.events import SEVERITIES, EventGroup
from ds_silent.runs.lines import number, of, text, whole
from ds_silent.runs.report.axis import shown
from ds_silent.runs.report.figures import PlotContext, batch_of
from ds_silent.runs.report.svg import Panel, cursor, x_labels
from ds_silent.runs.run import RunRecords

MOST_ROWS = 300
_TIMELINE = 24
_ROW = 18


@dataclass(frozen=True)
class FaultRow:
    """One fault."""

    kind: str
    severity: str
    who: str
    when: str
    step: int
    message: str
    remedy: str
    where: str
    figures: str
    count: int


@dataclass(frozen=True)
class PreflightTable:
    """The items that are not as expected (name, values, verdict), and how many are, by group."""

    wrong: tuple[tuple[str, str, str], ...]
    more: int
    passed: tuple[tuple[str, int], ...]
    total: int


def event_rows(view: PlotContext) -> list[FaultRow]:
    """Return the faults, worst first; above ``MOST_ROWS`` one row for each kind and severity, and all are counted."""
    groups = view.run.events.groups()
    rows = [_row(group, view.run) for group in groups[:MOST_ROWS]]
    rest: Counter[tuple[str, str]] = Counter()
    for group in groups[MOST_ROWS:]:
        rest[group.kind, group.severity] += group.count
    for (kind, severity), count in rest.most_common():
        said = f"{count:,} further events."
        rows.append(FaultRow(kind, severity, "several", "see events.jsonl", 0, said, "", "", "", count))
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
    return FaultRow(
        group.kind, group.severity, run.who(group), when, first,
        group.message, group.remedy, group.where, figures, group.count,
    )  # fmt: skip


def timeline(view: PlotContext) -> Panel | None:
    """Draw a row for each fault, worst first; further ones share the last row."""
    groups = [group for group in view.run.events.groups() if group.last > 0]
    if not groups:
        return None
    shown_groups, rest = groups[:_TIMELINE], groups[_TIMELINE:]
    if len(groups) == _TIMELINE + 1:
        shown_groups, rest = groups, []
    parts, labels = [], []
    for at, group in enumerate(shown_groups):
        spans = [(min(span[0], group.since) if not n else span[0], *span[1:]) for n, span in enumerate(group.spans)]
        parts += [
            _bar(view.axis.at(a) * 100, view.axis.at(b) * 100, group.severity, at, ended) for a, b, ended in spans
        ]
        who = ", ".join(str(rank) for rank in group.ranks[:3]) + ("…" if len(group.ranks) > 3 else "")
        labels.append(f"{group.kind}{f' · {who}' if who and len(group.ranks) < view.run.world_size else ''}"[:26])
    if rest:
        at = len(shown_groups)
        where: dict[str, set[int]] = {group.severity: set() for group in rest}
        for group in rest:
            for step in group.steps:
                where[group.severity].add(int(view.axis.at(step) * 200))
        for severity, bins in where.items():
            parts += [_bar(n / 2, n / 2 + 0.5, severity, at) for n in sorted(bins)]
        labels.append(f"{sum(group.count for group in rest):,} more events")
    height = _ROW * len(labels)
    lines = "".join(
        f'<text class="y" x="-8" y="{(n + 0.5) * _ROW + 4:.0f}">{escape(one)}</text>' for n, one in enumerate(labels)
    )
    stripes = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{(n + 0.5) * _ROW:.0f}" y2="{(n + 0.5) * _ROW:.0f}"/>'
        for n in range(len(labels))
    )
    markup = f'<svg class="chart timeline" role="img" aria-label="When each fault was there" height="{height + 20}">'
    markup += f"{stripes}{''.join(parts)}{lines}{x_labels(view.axis, height)}{cursor(height)}</svg>"
    keys = tuple((one, one) for one in SEVERITIES if any(group.severity == one for group in groups))
    return Panel(Markup(markup), {"series": []}, "", keys)


def _bar(first: float, last: float, severity: str, row: int, ended: int = 0) -> str:
    y = row * _ROW + 5
    width = f'width="{last - first:.2f}%"' if last - first > 0.6 else 'width="6"'
    x = min(first, 99.2)
    return f'<rect class="span {severity}{" ended" * ended}" x="{x:.2f}%" y="{y}" {width} height="{_ROW - 10}" rx="2"/>'


def facts_of(view: PlotContext) -> tuple[tuple[str, str], ...]:
    """Return what kind of run it is, in a few pairs."""
    run, facts, hosts, step = view.run, view.run.facts, view.run.hosts, view.run.steps.step
    stage, batch = whole(of(facts, "training", "ZeRO stage"), 9), batch_of(view)
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


def preflight_of(run: RunRecords) -> PreflightTable | None:
    """Return what was compared before step 1; None where nothing was."""
    items = run.preflight.get("items")
    if not isinstance(items, list):
        return None
    wrong, passed = [], Counter[str]()
    for one in items:
        if isinstance(one, dict) and one.get("ok") is True:
            passed[text(one.get("group"), 60) or "other"] += 1
        elif isinstance(one, dict):
            name = text(one.get("name"), 200) or "without a name"
            wrong.append((name, _values(one), text(one.get("verdict"), 300)))
    return PreflightTable(tuple(wrong[:100]), max(len(wrong) - 100, 0), tuple(passed.most_common(40)), len(items))


def _values(item: dict[str, Any]) -> str:
    values = item.get("values")
    if not isinstance(values, list):
        return ""
    listed = [text(value, 120) if isinstance(value, str) else shown(number(value)) for value in values[:4]]
    more = f" | and {len(values) - 4:,} more" if len(values) > 4 else ""
    return " | ".join(listed) + more


def repairs_of(run: RunRecords) -> list[EventGroup]:
    """Return what the responses have done and what it cost, as their events say."""
    groups = [group for group in run.events.groups() if group.kind == "repaired"]
    return sorted(groups, key=lambda one: one.first)[:100]
