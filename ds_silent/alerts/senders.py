"""Send one alert: to a webhook, by mail, to a command, through apprise, or to the run of an experiment tracker.

    send = sender_of(parse_destination("https://hooks.slack.com/services/…"), seconds=10.0)
    send(alert)                 # it was taken; else NotSent says why, without a secret

The senders of chats and mail are our own. apprise 2.2, measured: it answers True or False, so that status and
Retry-After are lost; its time-outs start anew with every byte; Discord's and Mattermost's ``@everyone`` stays a call;
mail goes with STARTTLS or without, not with it where it is offered; and its debug log holds the whole address.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shlex
import signal
import smtplib
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from email.message import EmailMessage
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from time import monotonic, time
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

from ds_silent.alerts.message import Alert, payload, plain_text
from ds_silent.config.destination import TRACKERS, Destination, Form, Mail

Send = Callable[[Alert], None]
TRY, MOST_TRIES = "ds_silent alert", 32
"""Name of a try's thread, and how many of them there may be, those left behind included."""


class NotSent(Exception):
    """The message is a few words of ours, never a library's: those may quote an address or a password.

    Attributes:
        again: whether a repetition may help.
        after: seconds that the server has asked to be left alone; None where it has not.
    """

    def __init__(self, why: str, *, again: bool = True, after: float | None = None):
        super().__init__(why)
        self.again, self.after = again, after


def sender_of(destination: Destination, seconds: float) -> Send:
    """Return what sends one alert there. Of a tracker: call it on the training thread, which has the run."""
    if destination.form in TRACKERS:
        return _tracker(destination.form)
    if destination.form == "command":
        return partial(_command, destination.address, seconds)
    if destination.form == "apprise":
        return partial(_apprise, destination.address, seconds)
    if destination.mail is not None:
        return partial(_within, seconds, partial(_mail, destination.mail, seconds))
    return partial(_within, seconds, partial(_post, destination.form, destination.address, seconds))


def why_of(error: BaseException) -> str:
    """Return what of a foreign error cannot hold a secret: its type, and the system's word for its number."""
    name = type(error).__name__
    if isinstance(error, socket.gaierror):  # of a failed search for a name the words are the resolver's own
        return f"{name} ({error.strerror})"
    if isinstance(error, OSError) and error.errno is not None and error.strerror == os.strerror(error.errno):
        return f"{name} ({error.strerror})"
    return name


# -- Webhooks and mail: a try with an end ------------------------------------------------------------------------------


_FINAL = (ssl.SSLCertVerificationError, http.client.InvalidURL, smtplib.SMTPNotSupportedError)
"""Errors that a repetition does not change."""


def _within(seconds: float, send: Send, alert: Alert) -> None:
    """Send on a thread that is left behind when the time is over: a server that drips starts a socket's time-out anew
    with every byte, and the search for a name has none."""
    if sum(each.name == TRY for each in threading.enumerate()) >= MOST_TRIES:
        raise NotSent("earlier tries have not ended yet")
    failed: list[NotSent] = []

    def send_it() -> None:
        try:
            send(alert)
        except NotSent as error:
            failed.append(error)
        except Exception as error:  # every way in which a network and a server can fail
            cause = getattr(error, "reason", None)  # urllib's
            cause = cause if isinstance(cause, Exception) else error
            why = f"the server could not be reached: {why_of(cause)}"
            failed.append(NotSent(why, again=not isinstance(cause, _FINAL)))

    until = monotonic() + seconds
    thread = threading.Thread(target=send_it, name=TRY, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive() or (failed and monotonic() >= until):
        raise NotSent(f"the server did not answer within {seconds:g} s")
    if failed:
        raise failed[0]


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Follow no redirection: the address is a secret of one host."""


def _post(form: Form, address: str, seconds: float, alert: Alert) -> None:
    """Post JSON; proxies are those of the environment, as urllib takes them."""
    headers = {"Content-Type": "application/json", "User-Agent": "ds_silent"}
    url = urlsplit(address)
    if url.username is not None:
        user = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        address = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2]))
    data = json.dumps(payload(form, alert)).encode()
    request = urllib.request.Request(address, data, headers, method="POST")
    encrypted = [urllib.request.HTTPSHandler(context=ssl.create_default_context())] if url.scheme == "https" else []
    try:
        urllib.request.build_opener(_Stays, *encrypted).open(request, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        error.close()
        status, why = error.code, f"the server answered {error.code}"
        if 300 <= status < 400:
            why += ", a redirection, which is not followed: give the address it leads to"
        again = status in (408, 425, 429) or status >= 500
        raise NotSent(why, again=again, after=_seconds_asked(error.headers.get("Retry-After"))) from None


def _seconds_asked(text: str | None) -> float | None:
    """Of a ``Retry-After``: seconds, or a date."""
    with suppress(ValueError, TypeError):
        return max(0.0, float(text or ""))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text or "").timestamp() - time())
    return None


def _mail(mail: Mail, seconds: float, alert: Alert) -> None:
    message = EmailMessage()
    message["Subject"], message["From"] = f"[ds_silent] {alert.title}", mail.sender
    message["To"], message["Date"] = ", ".join(mail.recipients), formatdate()
    # Not make_msgid(), which draws from the script's own generator.
    message["Message-ID"] = f"<{uuid4().hex}@{mail.sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"  # no absence notes in return
    message.set_content(plain_text(alert))
    try:
        refused = _submit(mail, message, seconds)
    except smtplib.SMTPAuthenticationError as error:
        raise NotSent(f"the server did not accept the user and password ({error.smtp_code})", again=False) from None
    except smtplib.SMTPRecipientsRefused as error:
        codes = sorted({code for code, _ in error.recipients.values()})
        why = f"the server refused all recipients ({', '.join(map(str, codes))})"
        raise NotSent(why, again=all(code < 500 for code in codes)) from None
    except smtplib.SMTPResponseException as error:
        raise NotSent(f"the server answered {error.smtp_code}", again=error.smtp_code < 500) from None
    if refused:
        raise NotSent(f"the server refused {refused} of {len(mail.recipients)} recipients", again=False)


def _submit(mail: Mail, message: EmailMessage, seconds: float) -> int:
    """Return how many recipients were refused. A password goes over TLS only, or to this machine itself."""
    if mail.encrypted:
        context = ssl.create_default_context()
        server: smtplib.SMTP = smtplib.SMTP_SSL(mail.host, mail.port, timeout=seconds, context=context)
    else:
        server = smtplib.SMTP(mail.host, mail.port, timeout=seconds)
    with closing(server):
        server.ehlo()
        if not mail.encrypted and server.has_extn("starttls"):
            context = ssl.create_default_context()
            if mail.is_here:  # it shows a certificate that it has made itself, if any
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            server.starttls(context=context)
            server.ehlo()
        elif not mail.encrypted and mail.password is not None and not mail.is_here:
            why = "the server offers no encryption, and a password is not sent without: use smtps://, or no password"
            raise NotSent(why, again=False)
        if mail.user is not None and mail.password is not None:
            server.login(mail.user, mail.password)
        refused = server.send_message(message)
        with suppress(Exception):  # it has the mail: a bad farewell is no reason to send it again
            server.putcmd("quit")
    return len(refused)


# -- Programs: the user's command, and apprise -------------------------------------------------------------------------

_APPRISE = """
import sys
sys.path = [each for each in sys.path if each]  # no file of the training's folder is taken for one of Python's
import json, apprise
given = json.load(sys.stdin)
to = apprise.Apprise(asset=apprise.AppriseAsset(app_id="ds_silent", http_redirects=False))
sys.exit(3 if not to.add(given.pop("to")) else 0 if to.notify(**given) else 4)
"""


def _command(command: str, seconds: float, alert: Alert) -> None:
    status = _status_of(shlex.split(command), {"source": "ds_silent", **asdict(alert)}, seconds, "the command")
    if status:
        raise NotSent(f"the command ended with status {status}")


def _apprise(address: str, seconds: float, alert: Alert) -> None:
    """Send by apprise in a process of its own: its log, which holds the address, goes nowhere, and it can be ended."""
    kind = {"info": "info", "warning": "warning", "error": "failure"}[alert.level]
    title, text = (each.replace("@", "@\u200b") for each in (alert.title, plain_text(alert)))  # @all calls nobody
    given = {"to": address, "title": title, "body": text, "notify_type": kind, "body_format": "text"}
    status = _status_of([sys.executable, "-c", _APPRISE], given, seconds, "apprise")
    if status:
        unknown = "apprise takes no such address: see its list of services"
        raise NotSent(unknown if status == 3 else "apprise could not send it, and says no more", again=status != 3)


def _status_of(words: Sequence[str], given: Any, seconds: float, who: str) -> int:
    """Run a program with JSON on its standard input, without a shell; what it prints may quote a secret of its own."""
    nowhere = subprocess.DEVNULL
    try:
        # A session of its own, so that what the program has started ends with it, and no Ctrl-C of the training's.
        started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    except OSError as error:
        raise NotSent(f"{who} cannot be started: {why_of(error)}", again=False) from None
    try:
        started.communicate(json.dumps(given).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        raise NotSent(f"{who} did not end within {seconds:g} s") from None
    except OSError as error:
        raise NotSent(f"{who} could not be told: {why_of(error)}") from None
    return started.returncode


# -- Trackers: the run is the script's; none is begun and no library imported here -------------------------------------

LONGEST_TITLE, LONGEST_TAG = 63, 5_000
"""Characters that W&B 0.31 takes as a title ("less than 64"), and every backend of MLflow as a tag's value."""
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


def _tracker(form: Form) -> Send:
    """Return what sends to the run that is under way now: MLflow's belongs to a thread, Trackio's to a context."""
    module = sys.modules.get(TRACKERS[form])
    find, begin, tell = _RUNS[form]
    run = None if module is None else find(module)
    if run is None:
        return partial(_no_run, f"no {form} run is under way on rank 0: call {begin} before the training")
    return partial(tell, module, run)


def _no_run(why: str, alert: Alert) -> None:
    raise NotSent(f"{why}, or leave the alert out", again=False)


def _wandb(module: Any, run: Any, alert: Alert) -> None:
    run.alert(title=alert.title[:LONGEST_TITLE], text=plain_text(alert), level=_LEVELS[alert.level])


def _mlflow(module: Any, run: Any, alert: Alert) -> None:
    """It has no alerts: a tag that the list of runs can show and be searched by, and a point of a curve."""
    client = module.MlflowClient()
    client.set_tag(run.info.run_id, "silent.last_alert", f"{alert.title}\n{plain_text(alert)}"[:LONGEST_TAG])
    client.log_metric(run.info.run_id, f"silent/alerts/{alert.level}", 1.0, step=alert.step)


def _trackio(module: Any, run: Any, alert: Alert) -> None:
    run.alert(title=alert.title, text=plain_text(alert), level=getattr(module.AlertLevel, _LEVELS[alert.level]))


def _comet(module: Any, run: Any, alert: Alert) -> None:
    """The notification is a mail, which only online experiments send; the text stays with the experiment."""
    run.log_text(f"{alert.title}\n{plain_text(alert)}", step=alert.step, metadata={"level": alert.level})
    run.send_notification(alert.title, status=alert.level, additional_data={"text": plain_text(alert)})


_RUNS: Mapping[str, tuple[Callable[[Any], Any], str, Callable[[Any, Any, Alert], None]]] = {
    "wandb": (lambda wandb: wandb.run, "wandb.init", _wandb),
    "mlflow": (lambda mlflow: mlflow.active_run(), "mlflow.start_run", _mlflow),
    "trackio": (lambda trackio: trackio.context_vars.current_run.get(), "trackio.init", _trackio),
    "comet": (lambda comet_ml: comet_ml.get_running_experiment(), "comet_ml.start", _comet),
}
"""Form -> how its run is found, what begins one, and how it is told."""
