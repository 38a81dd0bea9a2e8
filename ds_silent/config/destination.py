"""Read where an alert goes from ``"to"``, and what of it may be shown.

    destination = parse_destination("https://hooks.slack.com/services/T0/B0/secret")
    destination.form       # "slack"
    str(destination)       # "https://hooks.slack.com/…": the only form of it for logs, records and sentences

The whole address of a webhook is a secret, as is a password, and what a command is given may be one: nothing here, and
nothing that this raises, holds them but :attr:`Destination.address` and :attr:`Mail.password`, which have no ``repr``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

Webhook = Literal["json", "slack", "discord", "teams"]
Form = Webhook | Literal["mail", "command", "apprise", "monitor", "wandb", "mlflow", "trackio", "comet"]
TRACKERS: Mapping[str, str] = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "comet": "comet_ml"}
"""Form -> the module that a tracker is reached through."""
MUST = (
    'be a webhook "https://...", a mail server "smtp://user:password@host:587/somebody@example.org", '
    '"command:program", "apprise:service://...", "monitor", "wandb", "mlflow", "trackio", "comet" or "env:NAME"'
)
_FORMS = get_args(Webhook)
_SCHEMES = ("http", "https", "smtp", "smtps")
_APPRISE = re.compile(r"apprise:([a-z][a-z0-9]{0,30})://[!-~]+")
_ENVIRONMENT = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class WrongDestination(ValueError):
    """Nothing can be sent there; what it must be, and the remedy, without a secret."""

    def __init__(self, must: str, shown: str, remedy: str):
        super().__init__(f"must {must}, got {shown}; {remedy}")


@dataclass(frozen=True)
class Destination:
    """Attributes:
    form: what is sent, and how.
    shown: for people and records.
    address: of a webhook, a command or apprise, without the prefix that names its form; else empty.
    mail: of ``mail``, else None.
    """

    form: Form
    shown: str
    address: str = field(default="", repr=False)
    mail: Mail | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class Mail:
    """A mail server and what goes into the envelope."""

    host: str
    port: int
    encrypted: bool  # from the first byte; else by STARTTLS where the server offers it
    user: str | None
    password: str | None = field(repr=False)
    sender: str
    recipients: tuple[str, ...]

    @property
    def is_here(self) -> bool:
        """Whether what is sent there leaves this machine."""
        return self.host in _LOOPBACK


def environment_name(to: str) -> str | None:
    """Return the variable of an ``"env:NAME"``; None for anything else."""
    found = _ENVIRONMENT.fullmatch(to)
    return found[1] if found else None


def is_secret(to: object) -> bool:
    """Tell whether it may hold a secret itself."""
    return not (isinstance(to, str) and (to == "monitor" or to in TRACKERS or environment_name(to)))


def resolve(to: str, environment: Mapping[str, str] = os.environ) -> Destination:
    """Return the destination, read from the environment where ``to`` says so.

    Raises:
        WrongDestination: the variable is not set, or what is in it is no destination.
    """
    name = environment_name(to)
    if name is None:
        return parse_destination(to)
    value = environment.get(name, "").strip()
    if not value:
        raise WrongDestination(
            f"name an environment variable that is set on the host of rank 0 ({name} is not)",
            f'"env:{name}"',
            f"export {name} there, or leave the alert out",
        )
    if environment_name(value):
        raise WrongDestination(
            f"hold an address in {name}, not another name", f'"env:{name}"', "write the address there"
        )
    return parse_destination(value)


def parse_destination(to: str) -> Destination:
    """Return the destination that ``to`` writes out.

    Raises:
        WrongDestination: it is none.
    """
    if to == "monitor" or to in TRACKERS:
        return Destination(cast(Form, to), to)
    shown = masked(to)
    if to.startswith("command:"):
        return _command(to, shown)
    if _APPRISE.fullmatch(to):
        return Destination("apprise", shown, to.partition(":")[2])
    form, plain = _form_and_address(to)
    url = _split(plain)
    if url is None or url.scheme not in _SCHEMES:
        raise WrongDestination(MUST, shown, "see docs/alerts.md")
    if not url.hostname:
        raise WrongDestination("name a host behind ://", shown, "see docs/alerts.md")
    if re.search(r"[\s\x00-\x1f\x7f]", to) or not to.isascii():
        raise WrongDestination("have no blanks and only ASCII in its address", shown, "write others as %XX")
    if url.scheme in ("smtp", "smtps"):
        return Destination("mail", shown, mail=_mail(url, shown))
    return Destination(cast(Form, form or _recognised(url)), shown, plain)


def masked(value: object) -> str:
    """Return what may be shown of anything that was given as a destination, right or wrong."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:40]
    if not isinstance(value, str):
        return f"{'a list' if isinstance(value, (list, tuple)) else 'an object'}, which may hold a secret"
    if not value or not is_secret(value):
        return value if value == "monitor" or value in TRACKERS else f'"{value}"'
    if value.startswith("command:"):
        program, *arguments = value[len("command:") :].split() or [""]
        return f"command:{_plain(program.rpartition('/')[2])}{' …' if arguments else ''}"
    if of_apprise := _APPRISE.fullmatch(value):
        return f"apprise:{of_apprise[1]}://…"
    url = _split(_form_and_address(value)[1])
    if url is None or not re.fullmatch(r"[a-z][a-z0-9+.-]*", url.scheme) or not url.hostname:
        return f"a text of {len(value)} characters, which may hold a secret"
    if url.scheme not in _SCHEMES:  # of slack://TOKEN/... or tgram://TOKEN/... the place of the host is a secret
        return f"{url.scheme}://…"
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    port = "" if url.port is None else f":{url.port}"
    return f"{url.scheme}://{_plain(host)}{port}/…"


@contextmanager
def masked_in_log(logger: logging.Logger, block: Mapping[str, Any] | None) -> Iterator[None]:
    """While it lasts, mask the addresses of the block's ``alerts`` in what ``logger`` logs."""
    texts = [text for text in _texts((block or {}).get("alerts")) if is_secret(text)]
    shown = {form: masked(text) for text in texts for form in (text, json.dumps(text)[1:-1])}
    longest_first = sorted(shown, key=len, reverse=True)  # one may be the beginning of another

    def without(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        for text in longest_first:
            message = message.replace(text, shown[text])
        record.msg, record.args = message, None
        return True

    if shown:
        logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in what should be a list of objects, but for their levels."""
    if isinstance(value, str) and len(value) > len("warning"):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _plain(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:100])


def _form_and_address(to: str) -> tuple[str, str]:
    """Split ``slack+https://...``; the form is empty where none is named."""
    form, _, address = to.partition("+")
    return (form, address) if form in _FORMS else ("", to)


def _split(text: str) -> SplitResult | None:
    """Return None where no address can be read; a port that is none is found here too."""
    try:
        url = urlsplit(text)
        _ = url.port, url.hostname
    except ValueError:
        return None
    return url if "://" in text else None


def _recognised(url: SplitResult) -> Form:
    """Recognise the services' own addresses; anything else gets our JSON."""
    host, path = url.hostname or "", url.path
    if host in ("hooks.slack.com", "hooks.slack-gov.com") and path.startswith("/services/"):
        return "slack"  # /triggers/ and /workflows/ take the variables of a workflow: our JSON
    discord = host in ("discord.com", "discordapp.com") or host.endswith((".discord.com", ".discordapp.com"))
    if discord and re.match(r"/api/(v\d+/)?webhooks/", path):
        return "discord"
    if host.endswith(".webhook.office.com") or (
        host.endswith((".logic.azure.com", ".powerplatform.com")) and "/workflows/" in path
    ):
        return "teams"
    return "json"


def _command(to: str, shown: str) -> Destination:
    command = to.partition(":")[2]
    try:
        words = shlex.split(command)
    except ValueError:
        raise WrongDestination("have a command whose quotes are closed", shown, "close them") from None
    if not words or "\0" in to:
        raise WrongDestination("name a program behind command:", shown, 'write "command:/path/of/program argument"')
    return Destination("command", shown, command)


def _mail(url: SplitResult, shown: str) -> Mail:
    recipients = tuple(filter(None, unquote(url.path.strip("/")).split(",")))
    if not recipients or not all(map(_is_mail_address, recipients)):
        raise WrongDestination(
            "say whom the mail is for, behind the host",
            shown,
            "write smtp://host:587/somebody@example.org,other@example.org",
        )
    query = parse_qs(url.query)
    if set(query) - {"from"}:
        raise WrongDestination("have nothing but from= behind its ?", shown, "leave the others out")
    user = None if url.username is None else unquote(url.username)
    sender = query.get("from", [user if user and _is_mail_address(user) else recipients[0]])[0]
    if not _is_mail_address(sender):
        raise WrongDestination("have a mail address behind from=", shown, "write ?from=training@example.org")
    password = None if url.password is None else unquote(url.password)
    port = url.port or (465 if url.scheme == "smtps" else 25 if password is None else 587)
    assert url.hostname is not None
    return Mail(url.hostname, port, url.scheme == "smtps", user, password, sender, recipients)


def _is_mail_address(text: str) -> bool:
    return re.fullmatch(r"[^\s@,;<>\"\x00-\x1f]+@[^\s@,;<>\"\x00-\x1f]+", text) is not None
