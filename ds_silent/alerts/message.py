"""Word an event as a short message, in the forms that the services take. Pure.

    alert = alert_of(event, run="runs/my-run")
    body = payload("slack", alert)             # what is posted, as JSON values
    text = plain_text(alert)                   # of a mail

Names of layers, hosts and files come from outside: they are shown as text, and can neither call anybody (``@channel``)
nor move a line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ds_silent.config.destination import Form
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
    """What a person is told. ``left_out``: events that were not told before this one, see ``sink``."""

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
    """Word an event. ``run``: what its reader calls the training, such as the directory of its records."""
    ranks = event.ranks if event.global_ranks is None else event.global_ranks
    who = f", {ranks_of(ranks)}" if ranks else ""
    hosts = tuple(dict.fromkeys(one_line(place.host) for place in event.places or ()))
    title = one_line(f"{event.severity.upper()}: {event.kind} at step {event.step}{who}")[:200]
    text, remedy, run, shown = _cut(event.message), _cut(event.remedy), one_line(run)[:200], tuple(ranks[:64])
    return Alert(title, text, event.severity, event.kind, run, event.step, shown, hosts, remedy)


def summary_of(count: int, last: Alert) -> Alert:
    """Sum up ``count`` events that were left out; ``last`` is the newest of them."""
    title = f"{count} more events, the last one {last.kind} at step {last.step}"
    text = "They were more than this destination takes in an hour. All of them are in events.jsonl."
    return Alert(title, text, last.level, last.kind, last.run, last.step)


def details(alert: Alert) -> list[tuple[str, str]]:
    """Return name and value of what stands below the text."""
    left_out = f"{alert.left_out} more events before this one, see events.jsonl" if alert.left_out else ""
    ranks, hosts = (listed(each, SHOWN_RANKS) if each else "" for each in (alert.ranks, alert.hosts))
    lines = (("run", alert.run), ("step", str(alert.step)), ("ranks", ranks), ("hosts", hosts), ("and", left_out))
    return [(name, value) for name, value in lines if value]


def plain_text(alert: Alert) -> str:
    """Return the whole message but for its title, without a markup."""
    return "\n\n".join((*_parts(alert), "\n".join(f"{name}: {value}" for name, value in details(alert))))


def _parts(alert: Alert) -> list[str]:
    return list(filter(None, (alert.text, alert.remedy and f"What to do: {alert.remedy}")))


def payload(form: Form, alert: Alert) -> dict[str, Any]:
    """Return the JSON values for a webhook of the form."""
    if form == "slack":
        return {"text": escape(f"*{alert.title}*\n{plain_text(alert)}", quote=False)}  # <!channel> calls everybody
    if form == "discord":
        fields = [{"name": name, "value": value, "inline": True} for name, value in details(alert)]
        text, colour = "\n\n".join(_parts(alert)), _COLOURS[alert.level]
        embed = {"title": alert.title, "description": text, "color": colour, "fields": fields}
        return {"embeds": [embed], "allowed_mentions": {"parse": []}}
    if form == "teams":
        return _teams(alert)
    return {"source": "ds_silent", **asdict(alert)}


def _teams(alert: Alert) -> dict[str, Any]:
    """Return an adaptive card, which both the workflows and the connectors before them take."""
    title = {"text": alert.title, "size": "Medium", "weight": "Bolder", "color": _TEAMS[alert.level]}
    blocks = [{"type": "TextBlock", "wrap": True, **block} for block in (title, *({"text": t} for t in _parts(alert)))]
    facts = {"type": "FactSet", "facts": [{"title": name, "value": value} for name, value in details(alert)]}
    schema = {"$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4"}
    card = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None}
    return {"type": "message", "attachments": [{**card, "content": {**schema, "body": [*blocks, facts]}}]}


def _cut(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def reaches(event: Event, level: Severity) -> bool:
    """Tell whether an event is as bad as ``level``, or worse."""
    severity = event.severity if event.severity in LEVELS else "error"  # a word of a newer version is no small matter
    return LEVELS.index(severity) >= LEVELS.index(level)
