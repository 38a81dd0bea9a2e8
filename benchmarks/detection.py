"""How soon the detectors find a rank that is off, and how often they are wrong, on real gradients.

    python benchmarks/detection.py --seed 0                  # both parts; the gradients are computed once and cached
    python benchmarks/detection.py --part power --ranks 4    # one part, one world size
    python benchmarks/detection.py --part power --rate 1 --rate 1e-3     # a table for each stated rate
    python benchmarks/detection.py --part power --fault "gradients x 1.03" --limit 20000
    python benchmarks/detection.py --part power --dealt unknown --warm-up 1000    # against each rank's own past
    python benchmarks/detection.py --part own-shards --ranks 8 --walk 0.02        # ranks that are unlike each other

A step is a bootstrap: every simulated worker draws one micro-batch of the pool (``gradient_pool.py``: real gradients
of the warm embedded model, 4 rows each); loss, label tokens, norm and all inner products are the real ones. A fault
changes one worker's entries as it would change its gradient:

* scaled by s: its norm and inner products times s;
* rotated by relative noise e: its squared norm times 1 + e^2, its inner products as those of random noise seen through
  a sketch of 16,384 numbers;
* label noise: it draws from micro-batches whose gradients were computed with that share of labels replaced.

"At least" is what any test with the same false alarms needs to first order (``bound.py``).

Workers are unlike a cluster in two ways: their data are dealt perfectly at random, and the weights stand still. With
``--dealt unknown`` the detectors do not know the first of them.

The ranks of the part ``own-shards`` are numbers: each has an offset of its own in loss, log norm and cosine, drawn from
Student's t with 2 degrees of freedom, that walks at random by a share of the rank's own noise in every step.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
import typer
from bound import fewest_steps
from gradient_pool import LABEL_NOISE, Pool, load_or_collect
from rich.console import Console
from rich.table import Table

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.maths import statistics
from ds_silent.measure.evidence import Evidence
from ds_silent.records import Dealt, DirectionStats, Event, StepRecord

SKETCH = 16_384
CONSOLE = Console(width=110)


@dataclass(frozen=True)
class Fault:
    """What happens to the last worker."""

    name: str
    scale: float = 1.0
    rotation: float = 0.0
    kind: int = 0  # of the pool


FAULTS = (
    *(Fault(f"gradients x {s:g}", scale=s) for s in (1.03, 1.1, 1.5)),
    *(Fault(f"rotated by noise {e:g}", rotation=e) for e in (0.02, 0.05, 0.2)),
    *(Fault(f"label noise {100 * share:g} %", kind=1 + index) for index, share in enumerate(LABEL_NOISE)),
)
HEALTHY = Fault("healthy")


class Workers:
    """N simulated workers on the pool's gradients."""

    def __init__(self, pool: Pool, ranks: int, seed: int, uneven: bool = False, dealt: Dealt = "random"):
        self._pool, self._ranks, self._dealt = pool, ranks, dealt
        self._generator = torch.Generator().manual_seed(seed)
        self._healthy = pool.of_kind(0)
        few = pool.tokens[self._healthy] <= pool.tokens[self._healthy].double().quantile(0.25)
        self._few_tokens = self._healthy[few] if uneven else None  # rank 0 always draws short micro-batches

    def again(self) -> Workers:
        """The same workers, who will draw what these would."""
        other = copy.copy(self)
        other._generator = self._generator.clone_state()
        return other

    def step(self, step: int, fault: Fault) -> tuple[StepRecord, Evidence]:
        """The record of one step, as the observer would make it."""
        pool, ranks, bad = self._pool, self._ranks, self._ranks - 1
        chosen = self._draw(self._healthy, ranks)
        if self._few_tokens is not None:
            short = self._few_tokens[~torch.isin(self._few_tokens, chosen[1:])]  # never the others' micro-batch
            chosen[0] = self._draw(short, 1)[0]
        if fault.kind:
            chosen[bad] = self._draw(pool.of_kind(fault.kind), 1)[0]
        gram = pool.gram[chosen[:, None], chosen].clone()
        norms = gram.diagonal().sqrt()
        if fault.rotation:
            seen = torch.randn(ranks, generator=self._generator, dtype=torch.float64) / math.sqrt(SKETCH)
            gram[bad] += fault.rotation * norms[bad] * norms * seen
            gram[:, bad] = gram[bad]
            gram[bad, bad] = norms[bad] ** 2 * (1.0 + fault.rotation**2)
        gram[bad] *= fault.scale
        gram[:, bad] *= fault.scale
        cosines = statistics.normalised(gram)
        record = StepRecord(
            step=step,
            samples=step * 4 * ranks,
            epoch=None,
            world_size=ranks,
            loss=statistics.loss_stats(pool.loss[chosen]),
            grad_norm=statistics.norm_stats(gram.diagonal().sqrt(), "exact", float(gram.mean()) ** 0.5),
            direction=statistics.direction_stats(gram, cosines, "sketch", SKETCH),
            noise_scale=statistics.noise_scale(float(gram.diagonal().mean()), float(gram.mean()), ranks, 4.0),
            cosine_matrix=tuple(tuple(row) for row in cosines.tolist()),
        )
        return record, Evidence(label_tokens=tuple(pool.tokens[chosen].tolist()), dealt=self._dealt)

    def _draw(self, among: torch.Tensor, count: int) -> torch.Tensor:
        """Without replacement: the same micro-batch twice in a step would be a real duplicate."""
        while True:
            drawn = torch.randint(0, len(among), (count,), generator=self._generator)
            if len(drawn.unique()) == count:
                return among[drawn]


def false_alarms(pool: Pool, ranks: int, rate: float, steps: int, seed: int, uneven: bool) -> Counter[str]:
    """Number of events, by kind, in ``steps`` healthy steps."""
    workers, judge = Workers(pool, ranks, seed, uneven), Judge(DetectorsConfig(false_alarms_per_million_steps=rate))
    found: Counter[str] = Counter()
    for step in range(1, steps + 1):
        events = judge.step(*workers.step(step, HEALTHY))
        found.update(event.kind for event in events if event.phase not in ("ended", "ongoing"))
    return found


def own_shards(ranks: int, rate: float, steps: int, seed: int, walk: float) -> tuple[int, int]:
    """Notes, and warnings and errors, of ranks that are unlike each other and change by themselves."""
    random, judge = np.random.default_rng(seed), Judge(DetectorsConfig(false_alarms_per_million_steps=rate))
    offsets = random.standard_t(2, (3, ranks)) * np.array([[0.3], [0.5], [0.02]])
    noise = np.array([[0.2], [0.16], [0.03]]) * np.exp(0.3 * random.standard_normal((3, ranks)))
    notes = alarms = 0
    for step in range(1, steps + 1):
        offsets += walk * noise * random.standard_normal((3, ranks))
        drawn = offsets + noise * random.standard_normal((3, ranks))
        losses, norms = 2.0 * np.exp(np.clip(drawn[0], -3.0, 3.0)), np.exp(drawn[1])
        cosines = np.clip(0.1 + drawn[2], -1.0, 1.0)
        record = StepRecord(
            step=step,
            samples=step * 4 * ranks,
            epoch=None,
            world_size=ranks,
            loss=statistics.loss_stats(torch.from_numpy(losses)),
            grad_norm=statistics.norm_stats(torch.from_numpy(norms), "exact", 1.0),
            direction=DirectionStats("sketch", float(cosines.mean()), 0.0, per_rank=tuple(cosines.tolist())),
        )
        for event in judge.step(record, Evidence()):
            alarms += event.severity != "info" and event.phase != "ongoing"
            notes += event.severity == "info"
    return notes, alarms


def report_own_shards(worlds: list[int], rate: float, steps: int, seed: int, walk: float) -> None:
    for ranks in worlds:
        notes, alarms = own_shards(ranks, rate, steps, seed, walk)
        CONSOLE.print(
            f"rows of their own, N = {ranks}, offsets that walk by {walk:g} of the noise in a step, {rate:g} "
            f"per million stated: {alarms} warnings and errors, {notes} notes in {steps:,} steps"
        )


def delay(pool: Pool, warm: tuple[Workers, Judge, int], fault: Fault, limit: int) -> tuple[int | None, Event | None]:
    """Steps from a fault's first step to its event, counting that step; None when it took more than ``limit``."""
    workers, judge = warm[0].again(), copy.deepcopy(warm[1])  # every fault meets the same draws
    for step in range(1, limit + 1):
        for event in judge.step(*workers.step(warm[2] + step, fault)):
            if event.kind == "outlier-rank" and event.phase != "ended":
                return step, event
    return None, None


def poisson_interval(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean: the limit of the binomial's at small rates."""

    def below(mean: float, k: int) -> float:  # P(X <= k)
        return sum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, probability: float) -> float:
        low, high = 1e-9, 10.0 * count + 20.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle, k) > probability else (low, middle)
        return low

    return (0.0 if count == 0 else solve(count - 1, 0.975)), solve(count, 0.025)


def report_false_alarms(pool: Pool, worlds: list[int], rates: list[float], steps: int, seed: int) -> None:
    table = Table(title=f"False alarms on healthy bootstrapped steps (seed {seed})")
    columns = ("workers", "label tokens", "stated, per million", "steps", "alarms", "measured, per million", "95 %")
    for column in columns:
        table.add_column(column, justify="right")
    for rate in rates:
        for uneven in (False, True):
            for ranks in worlds:
                found = false_alarms(pool, ranks, rate, steps, seed + ranks, uneven)
                count = sum(found.values())
                low, high = (1e6 * bound / steps for bound in poisson_interval(count))
                kinds = ", ".join(f"{n} {kind}" for kind, n in found.items()) or "0"
                dealt = "rank 0 always few" if uneven else "at random"
                CONSOLE.print(f"N = {ranks}, tokens {dealt}, {rate:g} per million stated: {kinds} in {steps:,} steps")
                measured, interval = f"{1e6 * count / steps:.0f}", f"{low:.0f}-{high:.0f}"
                table.add_row(str(ranks), dealt, f"{rate:g}", f"{steps:,}", kinds, measured, interval)
    CONSOLE.print(table)


def report_power(
    pool: Pool,
    worlds: list[int],
    faults: list[Fault],
    rate: float,
    trials: int,
    limit: int,
    seed: int,
    dealt: Dealt,
    warm_up: int,
) -> None:
    said = f"{rate:g} false alarms per million steps"
    table = Table(title=f"Steps until the event, median (10 %-90 %) of {trials} runs; {said} (seed {seed})")
    table.add_column("fault on one worker")
    for ranks in worlds:
        table.add_column(f"N = {ranks}", justify="right")
        table.add_column("at least", justify="right")
    rows: dict[str, list[str]] = {fault.name: [fault.name] for fault in faults}
    for ranks in worlds:
        warm = []
        for trial in range(trials):
            workers = Workers(pool, ranks, seed + 1000 * trial + ranks, dealt=dealt)
            judge = Judge(DetectorsConfig(false_alarms_per_million_steps=rate))
            for step in range(1, warm_up + 1):
                judge.step(*workers.step(step, HEALTHY))
            warm.append((workers, judge, warm_up))
        for fault in faults:
            results = [delay(pool, pair, fault, limit) for pair in warm]
            rows[fault.name].append(summary(results, ranks, limit))
            least = fewest_steps(pool, ranks, 1e6 / rate, fault.scale, fault.rotation, fault.kind)
            found = f"{rows[fault.name][-1]}, any test at least {least:,.0f}"
            CONSOLE.print(f"{rate:g} per million, N = {ranks}, {fault.name}: {found}")
            rows[fault.name].append(f"{least:,.0f}")
    for row in rows.values():
        table.add_row(*row)
    CONSOLE.print(table)


def summary(results: list[tuple[int | None, Event | None]], ranks: int, limit: int) -> str:
    """Median and spread of the delays; how many were found, as a note only, and named another rank."""
    delays = sorted(limit + 1 if steps is None else steps for steps, _ in results)
    found = sum(steps is not None for steps, _ in results)
    wrong = sum(event is not None and event.ranks != (ranks - 1,) for _, event in results)
    notes = sum(event is not None and event.severity == "info" for _, event in results)

    def shown(value: int) -> str:
        return f">{limit:,}" if value > limit else f"{value:,}"

    low, middle, high = (delays[min(int(q * len(delays)), len(delays) - 1)] for q in (0.1, 0.5, 0.9))
    text = f"{shown(middle)} ({shown(low)}-{shown(high)})" if found else f">{limit:,}"
    text += "" if found == len(results) else f", {found}/{len(results)} found"
    text += f", {notes} as a note" if notes else ""
    return text + (f", {wrong} named another rank" if wrong else "")


def main(
    seed: Annotated[int, typer.Option(help="of the bootstrap and of the micro-batches")] = 0,
    part: Annotated[str, typer.Option(help="false-alarms, power, own-shards or all")] = "all",
    dealt: Annotated[
        str, typer.Option(help="what is known of the deal in the second table: random or unknown")
    ] = "random",
    warm_up: Annotated[int, typer.Option(help="healthy steps before a fault")] = 100,
    walk: Annotated[
        float, typer.Option(help="how far offsets move in a step of own-shards, in units of the noise")
    ] = 0.02,
    ranks: Annotated[list[int] | None, typer.Option(help="workers; may be given several times")] = None,
    steps: Annotated[int, typer.Option(help="healthy steps per row of the first table")] = 20_000,
    rate: Annotated[
        list[float] | None, typer.Option(help="stated false alarms per million steps; several make several tables")
    ] = None,
    trials: Annotated[int, typer.Option(help="runs per cell of the second table")] = 10,
    fault: Annotated[
        list[str] | None, typer.Option(help="one row of the second table; may be given several times")
    ] = None,
    limit: Annotated[int, typer.Option(help="steps after which a run gives up")] = 3000,
    batches: Annotated[int, typer.Option(help="healthy micro-batches in the pool")] = 2000,
    noisy: Annotated[int, typer.Option(help="micro-batches per label noise")] = 300,
    cache: Annotated[Path, typer.Option(help="where the gradients' statistics are kept")] = Path(
        "runs/gradient_pool.pt"
    ),
) -> None:
    """Detection delay and false alarms of the detectors on real gradients."""
    if part not in ("false-alarms", "power", "own-shards", "all"):
        raise typer.BadParameter(f"must be false-alarms, power, own-shards or all, got {part!r}", param_hint="--part")
    if dealt not in ("random", "unknown"):
        raise typer.BadParameter(f"must be random or unknown, got {dealt!r}", param_hint="--dealt")
    unknown = set(fault or ()) - {known.name for known in FAULTS}
    if unknown:
        names = ", ".join(known.name for known in FAULTS)
        raise typer.BadParameter(f"must be among {names}; got {min(unknown)!r}", param_hint="--fault")
    torch.set_num_threads(1)
    started = time.perf_counter()
    worlds = ranks or [4, 8, 64]
    if part == "own-shards":
        for one in rate or [1.0]:
            report_own_shards(worlds, one, steps, seed, walk)
        return
    cache.parent.mkdir(parents=True, exist_ok=True)
    pool = load_or_collect(cache, batches, noisy, seed)
    healthy = pool.of_kind(0)
    CONSOLE.print(
        f"{len(healthy)} micro-batches: loss {pool.loss[healthy].mean():.2f} ± {pool.loss[healthy].std():.2f}, norm CV "
        f"{pool.gram.diagonal()[healthy].sqrt().std() / pool.gram.diagonal()[healthy].sqrt().mean():.2f}, label tokens "
        f"{int(pool.tokens[healthy].min())}-{int(pool.tokens[healthy].max())}"
    )
    if part in ("false-alarms", "all"):
        report_false_alarms(pool, worlds, rate or [1.0, 1000.0], steps, seed)
    if part in ("power", "all"):
        for one in rate or [1.0]:
            faults = [f for f in FAULTS if not fault or f.name in fault]
            report_power(pool, worlds, faults, one, trials, limit, seed, cast(Dealt, dealt), warm_up)
    CONSOLE.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    typer.run(main)
