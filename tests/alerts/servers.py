"""Real servers on this machine that take alerts, or do what servers do wrongly; and an alert for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ds_silent.alerts.message import Alert, alert_of
from ds_silent.records import Place
from tests.sinks.example_records import event

SECRET = "s3cr3t-T0k3n"
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Http:
    """``bodies`` of what arrived, ``times`` of arrival; each request gets the next of the answers, then the last."""

    address: str
    bodies: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, count: int, seconds: float = 20.0) -> None:
        """Until so many have arrived."""
        until = time.monotonic() + seconds
        while len(self.bodies) < count:
            assert time.monotonic() < until, f"{len(self.bodies)} of {count} requests"
            time.sleep(0.01)


def an_alert() -> Alert:
    places = (Place(3, 3, "node0007", 3, "cuda:3", None), Place(4, 4, "node0007", 4, "cuda:4", None))
    return alert_of(replace(event(12, "replica-drift", (3, 4), "They <differ> & @all."), places=places), "runs/my-run")


def status(code: int, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


FINE = status(200)


@contextmanager
def http_server(*answers: Answer) -> Iterator[Http]:
    answers = answers or (FINE,)
    found = Http("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.times.append(time.monotonic())
            found.paths.append(self.path)
            found.headers.append(dict(self.headers))
            answer = answers[min(len(found.bodies), len(answers) - 1)]
            found.bodies.append(json.loads(body))
            try:
                answer(self)
            except OSError:
                self.close_connection = True

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def hangs(seconds: float = 60.0) -> Answer:
    """Nothing is answered."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)

    return answer


def slow(seconds: float) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        FINE(request)

    return answer


def drips(request: BaseHTTPRequestHandler) -> None:
    """A first line that never ends, a byte at a time."""
    request.wfile.write(b"HTTP/1.1 ")
    for _ in range(600):
        request.wfile.write(b"x")
        request.wfile.flush()
        time.sleep(0.1)


def closes(request: BaseHTTPRequestHandler) -> None:
    """In the middle of its answer."""
    request.wfile.write(b"HTTP/1.")
    request.wfile.flush()
    request.close_connection = True
    request.connection.shutdown(2)


@contextmanager
def mail_server(**settings: Any) -> Iterator[Any]:
    """aiosmtpd; its ``taken`` are the envelopes. ``reply``: what it answers to a mail."""
    controllers = pytest.importorskip("aiosmtpd.controller")
    taken: list[Any] = []
    replies: Sequence[str] = settings.pop("replies", ("250 OK",))

    class Handler:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
            reply = replies[min(len(taken), len(replies) - 1)]
            taken.append((session, envelope))
            return reply

    class OwnPort(controllers.Controller):  # type: ignore[name-defined, misc]
        def _trigger_server(self) -> None:
            self.port = self.server.sockets[0].getsockname()[1]
            super()._trigger_server()

    controller = OwnPort(Handler(), hostname="127.0.0.1", port=0, **settings)
    controller.taken = taken
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()
