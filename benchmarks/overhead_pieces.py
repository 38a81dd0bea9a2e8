"""What one measured step pays for: every piece of what ds_silent does in it, on each rank, and their sum.

    python benchmarks/overhead.py --part pieces --framework ddp --pairs 60

Functions of ds_silent are wrapped from here, in some steps only; the package itself is as it is. A piece's time is its
own: what another piece does inside it, and the training's own functions that a wrapper calls, count elsewhere. There
are these steps, in alternation:

* **observed**, without a wrapper: the difference to the plain steps beside it is what the pieces have to add up to.
* **timed**: wall time of each piece in one step, CPU time in another, because asking for a thread's CPU time is a
  call of the system, at which a busy machine may let another process go first. What a wrapper costs is subtracted.
* **split**: how much of the CPU time passes inside torch, or inside a compiled function called by ctypes. The rest is
  Python's.
* **counted**, once: operations of torch and calls of compiled functions, bytes that the operations read and write
  (without credit for caches; not those of compiled functions), and bytes of gradients, or of what else is summed up,
  handed to an accumulator or a checksum.

What is in no piece: hooks as torch itself calls them, and the training's own work that is slower because ds_silent has
used the caches. A step ends when rank 0 has judged it, as in the other part of the benchmark.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import observed as attached
from paired import Shift, shift
from pieces import CLOCKS, JUDGE, WRITER, Counted, Pieces, Split, cost_of_looks, cost_of_wrappers, installed, size_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

BLOCK = {"interval": 1}
PAIRS = 3  # observed steps beside plain ones for each step in pieces: a difference is the noisier of the two


@dataclass
class Rank:
    """What one rank has measured."""

    plain: list[tuple[float, float, float]] = field(default_factory=list)  # wall, the thread's CPU, the process's
    added: list[tuple[float, float, float]] = field(default_factory=list)  # likewise, to the plain steps beside it
    wall: list[dict[str, Any]] = field(default_factory=list)  # by piece, of each such step
    cpu: list[dict[str, Any]] = field(default_factory=list)
    split: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)
    wrapper: dict[str, float] = field(default_factory=dict)  # seconds that one adds, by clock
    gradient: int = 0  # bytes


class Steps:
    """Plain and observed steps of one training."""

    def __init__(self, engine: Any, tokens: Tensor, directory: str, block: dict[str, Any] | None = None):
        self._engine, self._tokens = engine, tokens
        self.costs = {name: cost_of_wrappers(clock) for name, clock in CLOCKS.items()}
        self._observer = attached(engine, {"output_dir": f"{directory}/pieces", **(block or BLOCK)})
        self._observer._capture.close(ended=False)

    def plain(self, finish: Callable[[], object] = list, drain: Callable[[], object] = list) -> tuple[float, ...]:
        """Seconds on the clock, of this thread's CPU, and of all threads', with what goes on beside it."""
        dist.barrier()
        began = time.perf_counter(), time.thread_time(), time.process_time()
        loss = self._engine(input_ids=self._tokens, labels=self._tokens).loss
        self._engine.backward(loss)
        self._engine.step()
        finish()
        wall, thread = time.perf_counter(), time.thread_time()
        drain()
        return wall - began[0], thread - began[1], time.process_time() - began[2]

    def observed(self) -> tuple[float, ...]:
        """Hooks are put on and taken off beside the clocks."""
        recorder = self._observer._publisher.recorder
        self._observer.connect()
        try:
            return self.plain(lambda: recorder.finish(), getattr(recorder._sink, "drain", list))
        finally:
            self._observer._capture.close(ended=False)

    def in_pieces(self, clock: str, mode: Callable[[Pieces], Any] | None = None) -> dict[str, Any]:
        """An observed step's pieces."""
        pieces = Pieces(CLOCKS[clock], mode)
        with installed(pieces):
            self.observed()
        return {name: asdict(spent) for name, spent in pieces.without(self.costs[clock]).items()}


def measure(engine: Any, tokens: Tensor, directory: str, pairs: int, seconds: float) -> None:
    """Every rank calls it, and leaves ``pieces-RANK.json`` after each cycle."""
    rank, steps, Split.look = dist.get_rank(), Steps(engine, tokens, directory), cost_of_looks()
    for _ in range(5):  # files, plans and caches, and until what is gathered is judged
        steps.observed()
    found = Rank(counted=steps.in_pieces("wall", Counted))
    found.wrapper = {name: cost.own + cost.around for name, cost in steps.costs.items()}
    found.gradient = sum(size_of(parameter) for parameter in engine.module.parameters())
    file, partial_file = Path(directory, f"pieces-{rank}.json"), Path(directory, f"partial-{rank}.json")
    started, enough = time.monotonic(), False
    bar = tqdm(total=pairs, unit="pair", desc="measuring", disable=rank != 0)
    while not enough:
        row = [steps.plain()]
        for _ in range(PAIRS):
            row += [steps.observed(), steps.plain()]
        found.wall.append(steps.in_pieces("wall"))
        found.cpu.append(steps.in_pieces("cpu"))
        found.split.append(steps.in_pieces("cpu", Split))
        steps.plain()
        found.plain += row[::2]
        for before, observed, after in zip(row[::2], row[1::2], row[2::2], strict=False):
            found.added.append(tuple(o - (b + a) / 2 for b, o, a in zip(before, observed, after, strict=True)))
        partial_file.write_text(json.dumps(asdict(found)))
        partial_file.replace(file)
        bar.update(PAIRS)
        enough = len(found.added) >= pairs or (seconds > 0 and time.monotonic() - started > seconds)
        word = torch.tensor([int(enough)], dtype=torch.int32)
        dist.broadcast(word, src=0)
        enough = bool(word.item())
    bar.close()


# -- the report --------------------------------------------------------------------------------------------------------


def report(directory: str, title: str) -> None:
    """A table for each rank that has left its file."""
    console = Console(width=150)
    for file in sorted(Path(directory).glob("pieces-*.json")):
        rank = file.stem.rpartition("-")[2]
        found = Rank(**json.loads(file.read_text()))
        console.print(table_of(found, f"rank {rank}; {title}; plain step {milliseconds(found)[0]:.0f} ms"))
        for line in sums_of(found):
            console.print(line)


def milliseconds(found: Rank) -> list[float]:
    """Wall, CPU of the thread and of the process: of the typical plain step."""
    return [1e3 * statistics.median(column) for column in zip(*found.plain, strict=True)]


def typical(steps: list[dict[str, Any]], piece: str, name: str) -> float:
    """The median over the steps; a piece that did not come took nothing."""
    return statistics.median(step.get(piece, {}).get(name, 0) for step in steps)


def table_of(found: Rank, title: str) -> Table:
    """The pieces in the order in which they come in a step."""
    table = Table(title=title, caption="of one measured step; times in ms, the typical step's")
    columns = (
        "piece",
        "calls",
        "wall",
        "CPU",
        "in compiled code",
        "Python",
        "operations",
        "moved, MB",
        "handed over, MB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "piece" else "right")
    for piece in pieces_of(found):
        wall, cpu = (1e3 * typical(steps, piece, "seconds") for steps in (found.wall, found.cpu))
        inside = 1e3 * typical(found.split, piece, "compiled")
        counted = {"operations": 0, "moved": 0, "gradient": 0, **found.counted.get(piece, {})}
        calls = int(typical(found.cpu, piece, "calls"))
        sizes = [f"{counted[name] / 1e6:.1f}" if counted[name] else "" for name in ("moved", "gradient")]
        times = [f"{value:.2f}" for value in (wall, cpu, inside, cpu - inside)]
        table.add_row(piece, str(calls), *times, str(counted["operations"] or ""), *sizes)
    return table


def pieces_of(found: Rank) -> list[str]:
    """Those of the training's thread that come in the typical step."""
    names = dict.fromkeys(name for step in found.cpu for name in step)
    return [name for name in names if name not in (JUDGE, WRITER) and typical(found.cpu, name, "calls") > 0]


def sums_of(found: Rank) -> Iterator[str]:
    """Their sum beside the measured difference, and what other threads do."""
    for steps, label, column in ((found.wall, "wall time", 0), (found.cpu, "CPU time of the training's thread", 1)):
        total = 1e3 * sum(typical(steps, piece, "seconds") for piece in pieces_of(found))
        measured = shift([1e3 * added[column] for added in found.added])
        share = f"{100 * total / measured.middle:.0f} %" if measured.middle > 0 else "-"
        plain = milliseconds(found)[column]
        yield (
            f"{label}: the pieces are {total:.1f} ms, added are {interval(measured)} to {plain:.0f} ms: {share} found"
        )
    beside = {name: 1e3 * typical(found.cpu, name, "seconds") for name in (JUDGE, WRITER)}
    others = shift([1e3 * (added[2] - added[1]) for added in found.added])
    yield (
        f"other threads' CPU time: {interval(others)}; of it {JUDGE} {beside[JUDGE]:.1f} ms, "
        f"{WRITER} {beside[WRITER]:.1f} ms, the rest is the exchange's"
    )
    handed = sum(counted["gradient"] for counted in found.counted.values())
    wall, cpu = (1e6 * found.wrapper[name] for name in ("wall", "cpu"))
    yield (
        f"handed over: {handed / found.gradient:.2f} times the {found.gradient / 1e6:.1f} MB of the parameters here; "
        f"{wall:.1f} us of wall and {cpu:.1f} us of CPU time are subtracted for each wrapper"
    )


def interval(value: Shift) -> str:
    """In milliseconds."""
    return f"{value.middle:+.1f} ms ({value.low:+.1f} .. {value.high:+.1f})"
