"""An event as a short message, and the forms in which the services take it. Pure.

    alert = alert_of(event, run="runs/my-run")
    body = payload("slack", alert)             # what is posted, as JSON values
    text = plain_text(alert)                   # of a mail

Names of layers, hosts and files come from outside: they are shown as text, and can neither call anybody (``@channel``)
nor move a line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ds_silent.destination import Form
from ds_silent.distributed.parts import SHOWN_RANKS, listed, ranks_of
from ds_silent.records import Event, Severity
from ds_silent.text import one_line

LONGEST = 1_500
"""Characters of a message and of a remedy: every service takes both together."""
LEVELS: tuple[Severity, ...] = ("info", "warning", "error")
"""From the least to the worst."""
_COLOURS: dict[Severity, int] = {"info": 0x3B82F6, "warning": 0xD97706, "error": 0xDC2626}
_TEAMS: dict[Severity, str] = {"info": "Accent", "warning": "Warning", "error": "Attention"}


@dataclass(frozen=True)
class Alert:
    """What a person is told. ``left_out``: events that were not told before this one, see :mod:`.delivery`."""

    title: str
    text: str
    level: Severity
    kind: str
    run: str
    step: int
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    remedy: str = ""
    left_out: int = 0


def alert_of(event: Event, run: str) -> Alert:
    """The message of an event. ``run``: what its reader calls the training, such as the directory of its records."""
    ranks = event.ranks if event.global_ranks is None else event.global_ranks
    who = f", {ranks_of(ranks)}" if ranks else ""
    hosts = tuple(dict.fromkeys(one_line(place.host) for place in event.places or ()))
    return Alert(
        title=one_line(f"{event.severity.upper()}: {event.kind} at step {event.step}{who}")[:200],
        text=_cut(event.message),
        level=event.severity,
        kind=event.kind,
        run=one_line(run)[:200],
        step=event.step,
        ranks=tuple(ranks[:64]),
        hosts=hosts,
        remedy=_cut(event.remedy),
    )


def summary_of(count: int, last: Alert) -> Alert:
    """What was left out, where nothing else is to be told. ``last``: of those, the newest."""
    return Alert(
        title=f"{count} more events, the last one {last.kind} at step {last.step}",
        text="They were more than this destination takes in an hour. All of them are in events.jsonl.",
        level=last.level,
        kind=last.kind,
        run=last.run,
        step=last.step,
    )


def details(alert: Alert) -> list[tuple[str, str]]:
    """Name and value of what stands below the text; what is not known is left out."""
    lines = [("run", alert.run), ("step", str(alert.step))]
    if alert.ranks:
        lines.append(("ranks", listed(alert.ranks, SHOWN_RANKS)))
    if alert.hosts:
        lines.append(("hosts", listed(alert.hosts, SHOWN_RANKS)))
    if alert.left_out:
        lines.append(("and", f"{alert.left_out} more events before this one, see events.jsonl"))
    return lines


def plain_text(alert: Alert) -> str:
    """The whole message without a markup, its title left to the caller."""
    below = "\n".join(f"{name}: {value}" for name, value in details(alert))
    return "\n\n".join(filter(None, (alert.text, alert.remedy and f"What to do: {alert.remedy}", below)))


def payload(form: Form, alert: Alert) -> dict[str, Any]:
    """JSON values for a webhook of the form."""
    if form == "slack":
        return {"text": _slack(alert)}
    if form == "discord":
        fields = [{"name": name, "value": value, "inline": True} for name, value in details(alert)]
        text = "\n\n".join(filter(None, (alert.text, alert.remedy and f"What to do: {alert.remedy}")))
        embed = {"title": alert.title, "description": text, "color": _COLOURS[alert.level], "fields": fields}
        return {"embeds": [embed], "allowed_mentions": {"parse": []}}
    if form == "teams":
        return _teams(alert)
    return {"source": "ds_silent", **asdict(alert)}


def _slack(alert: Alert) -> str:
    text = plain_text(alert)
    for sign, written in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
    ):  # Slack's own three; <!channel> calls everybody
        text = text.replace(sign, written)
    title = alert.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"*{title}*\n{text}"


def _teams(alert: Alert) -> dict[str, Any]:
    """An adaptive card, which both the workflows and the connectors before them take."""
    title = {"type": "TextBlock", "size": "Medium", "weight": "Bolder", "text": alert.title, "wrap": True}
    body: list[dict[str, Any]] = [{**title, "color": _TEAMS[alert.level]}]
    for text in filter(None, (alert.text, alert.remedy and f"What to do: {alert.remedy}")):
        body.append({"type": "TextBlock", "text": text, "wrap": True})
    body.append({"type": "FactSet", "facts": [{"title": name, "value": value} for name, value in details(alert)]})
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _cut(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def reaches(event: Event, level: Severity) -> bool:
    """Whether an event is as bad as ``level``, or worse."""
    severity = event.severity if event.severity in LEVELS else "error"  # a word of a newer version is no small matter
    return LEVELS.index(severity) >= LEVELS.index(level)
