"""What alerts cost a training's steps: to a server that hangs, to one that is fine, and to nobody. Two real ranks.

    python benchmarks/alerts.py --rounds 6 --steps 100

The three take turns within the same processes, in another order each round, so that what else the machine does strikes
all alike. An event is reported at every fifth step, far more than a training has. A round's ratio is that of the
medians of its step times.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.practice.ranks import results_of
from ds_silent.records import Event

EVERY = 5
"""Steps from one event to the next."""
Times = dict[str, list[list[float]]]
"""Way -> round -> seconds of each step, of rank 0."""


@contextmanager
def hanging_server() -> Iterator[str]:
    """It accepts, and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/secret-token"


@contextmanager
def fine_server() -> Iterator[tuple[str, list[float]]]:
    """Its address, and when each alert has come (``time.time``)."""
    arrived: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append(time.time())
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-token", arrived
    finally:
        server.shutdown()
        server.server_close()


def train(directory: str, destinations: dict[str, str | None], rounds: int, steps: int, width: int) -> dict[str, Any]:
    """On each rank; what rank 0 has measured."""
    times: Times = {way: [] for way in destinations}
    ends: dict[str, list[float]] = {way: [] for way in destinations}
    reported: list[float] = []
    for number in range(rounds):
        ways = list(destinations)
        random.Random(number).shuffle(ways)  # the same order on every rank
        for way in ways:
            torch.manual_seed(1)
            layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)]
            model = DistributedDataParallel(torch.nn.Sequential(*layers))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            to = destinations[way]
            alerts = [] if to is None else [{"to": to, "level": "info", "timeout": 5, "at_most_per_hour": 1000}]
            block = {"output_dir": f"{directory}/{way}-{number}", "tensorboard": False, "alerts": alerts}
            observer = ds_silent.attach_ddp(model, optimizer, config=block)
            seconds = []
            for step in range(steps):
                began = time.perf_counter()
                model(torch.randn(64, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0 and step % EVERY == 0:
                    if way == "fine":
                        reported.append(time.time())
                    observer.report(Event(step, "repaired", "info", (0,), f"at {step}", None, None, "Made.", "None."))
                seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            observer.close()
            ends[way].append(time.perf_counter() - began)
            times[way].append(seconds[2:])  # the first ones start what is started once
            dist.barrier()
    return {"times": times, "ends": ends, "reported": reported}


def measure(rounds: int, steps: int, width: int = 512) -> dict[str, Any]:
    """Of rank 0: ``times`` and ``ends`` by way, ``delays`` in seconds of the alerts to the server that is fine."""
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory())
        hanging, (fine, arrived) = stack.enter_context(hanging_server()), stack.enter_context(fine_server())
        destinations = {"nobody": None, "hanging": hanging, "fine": fine}
        arguments = (directory, destinations, rounds, steps, width)
        found: dict[str, Any] = results_of(train, arguments, 2, 600.0)[0]
        written = [path.read_text(errors="replace") for path in Path(directory).glob("**/*.json*")]
    reported = found["reported"]
    # in order, and some summed up where they come faster than they are sent: only the first of a queue is comparable
    found["delays"] = [came - reported[k] for k, came in enumerate(arrived[: len(reported)])]
    found["secrets"] = sum("secret-token" in text for text in written)
    return found


def ratio_line(found: Times, way: str) -> str:
    """The median of the rounds' ratios to nobody, with the smallest and the largest."""
    pairs = zip(found[way], found["nobody"], strict=True)
    ratios = sorted(statistics.median(mine) / statistics.median(plain) for mine, plain in pairs)
    milliseconds = 1e3 * statistics.median(statistics.median(each) for each in found[way])
    return f"{milliseconds:7.2f} ms  {statistics.median(ratios):.3f} ({ratios[0]:.3f} .. {ratios[-1]:.3f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    found = measure(options.rounds, options.steps)
    print("alerts to   median step  ratio to nobody (rounds)  longest step  end of the run")
    for way, rounds in found["times"].items():
        longest = 1e3 * max(max(each) for each in rounds)
        print(f"{way:<9} {ratio_line(found['times'], way)}  {longest:6.1f} ms  {max(found['ends'][way]):.2f} s")
    print(f"an alert arrived within {max(found['delays']):.3f} s of its event (of {len(found['delays'])})")


if __name__ == "__main__":
    main()
