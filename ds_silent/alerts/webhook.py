"""POST of a JSON body, with a bound on the whole of it.

    post("https://hooks.slack.com/services/…", {"text": "…"}, seconds=10.0)      # or NotSent

Redirections are not followed: the address is a secret of one host. A socket's time-out starts anew with every byte, so
the connection of a server that drips is shut when the seconds are over. Proxies are taken from the environment
(``https_proxy``, ``no_proxy``), as urllib does.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from time import monotonic, time
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from ds_silent.alerts.failure import NotSent, why_of

_LATER = (408, 425, 429)  # beside 5xx: what a server may take another time


def post(address: str, body: Any, seconds: float) -> None:
    """Raises:
    NotSent: nobody took it.
    """
    url, headers = _without_user(address)
    data = json.dumps(body, ensure_ascii=True).encode()
    headers |= {"Content-Type": "application/json", "User-Agent": "ds_silent"}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    held: list[http.client.HTTPConnection] = []
    opener = urllib.request.build_opener(_Stays, _Http(held), _Https(held))
    until = monotonic() + seconds
    timer = threading.Timer(seconds, partial(_shut, held))
    timer.daemon = True
    timer.start()
    try:
        with opener.open(request, timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        status, asked = error.code, _seconds_asked(error.headers.get("Retry-After"))
        error.close()
        if 300 <= status < 400:
            why = f"the server answered {status}, a redirection, which is not followed: give the address it leads to"
            raise NotSent(why, again=False) from None
        raise NotSent(f"the server answered {status}", again=status in _LATER or status >= 500, after=asked) from None
    except Exception as error:  # every way in which a network and a server can fail
        if monotonic() >= until or isinstance(getattr(error, "reason", error), TimeoutError):
            raise NotSent(f"the server did not answer within {seconds:g} s") from None
        reason = getattr(error, "reason", error)
        why = why_of(reason if isinstance(reason, BaseException) else error)
        again = not isinstance(reason, (ssl.SSLCertVerificationError, http.client.InvalidURL))
        raise NotSent(f"the server could not be reached: {why}", again=again) from None
    finally:
        timer.cancel()


def _without_user(address: str) -> tuple[str, dict[str, str]]:
    """The address without ``user:password@``, and the header that they become."""
    url = urlsplit(address)
    if url.username is None:
        return address, {}
    said = f"{unquote(url.username)}:{unquote(url.password or '')}"
    plain = urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2]))
    return plain, {"Authorization": f"Basic {base64.b64encode(said.encode()).decode()}"}


def _seconds_asked(text: str | None) -> float | None:
    """Of a ``Retry-After``: seconds, or a date."""
    if text is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    return None


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Nowhere: the answer stands as it is."""


def _made(
    kind: Callable[..., http.client.HTTPConnection], held: list[http.client.HTTPConnection], *args: Any, **named: Any
) -> http.client.HTTPConnection:
    held.append(kind(*args, **named))
    return held[-1]


class _Http(urllib.request.HTTPHandler):
    def __init__(self, held: list[http.client.HTTPConnection]):
        super().__init__()
        self._held = held

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_made, http.client.HTTPConnection, self._held), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, held: list[http.client.HTTPConnection]):
        super().__init__()
        self._held = held

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        made = partial(_made, http.client.HTTPSConnection, self._held, context=ssl.create_default_context())
        return self.do_open(made, request)


def _shut(held: list[http.client.HTTPConnection]) -> None:
    for connection in held:
        if connection.sock is not None:
            with suppress(OSError):
                # not TLS's own, which would change what the other thread is reading from
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
