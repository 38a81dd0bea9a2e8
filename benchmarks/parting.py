"""Where two trainings part: faults injected into one of two real trainings, and healthy repetitions of one.

    python benchmarks/parting.py                        # 3 seeds, 6 healthy pairs of each kind: 10 minutes on 2 cores
    python benchmarks/parting.py --seeds 20 --healthy 40
    python benchmarks/parting.py --fault rate --fault sign

DistributedDataParallel over gloo on the CPU, a small GPT and fp32, each training observed as a user has it. A trains on
4 ranks; B, with the fault, on 4 or 2 ranks in turn. A fault is right where step, link and layer are. Healthy pairs have
another number of ranks, other buckets, more threads, or accumulate; none of them may part.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import ds_silent
from ds_silent.practice.ranks import on_ranks

CONSOLE = Console(width=120)
ROWS, LAYER = 16, "layers.1"


@dataclass(frozen=True)
class Fault:
    """What is injected, and what must be said of it."""

    link: str
    layer: str | None  # None: no layer, or all
    always: bool = False  # it is there from the first step
    about: str = ""
    earliest: int = 1  # step at which it can move a number


FAULTS = {
    "rate": Fault("rates", None, about="the rate x 1.1 from a step on"),
    "layer-scaled": Fault("local", LAYER, about="one layer's gradient x 1.001"),
    "row": Fault("rows", None, about="one row of one batch is another"),
    "decay": Fault("update", "layers.0", about="biases and norms decay too (0.01)"),
    "sign": Fault("local", LAYER, about="the gradient of one bias has the other sign"),
    "epsilon": Fault("update", "embedding", about="Adam's epsilon 1e-6, not 1e-8"),
    "masters": Fault("update", "embedding", about="weights are kept in bf16"),
    "clipping": Fault("applied", None, about="clips to half the norm"),
    "accumulation": Fault("local", None, about="2 micro-batches, not divided"),
    "loss-halved": Fault("local", None, about="the loss is halved"),
    "changed": Fault("applied", None, about="one layer's gradient x 1.01 behind the reduction"),
    "initial": Fault("weights", "embedding", True, "one weight tensor begins 0.001 higher"),
    "momentum": Fault("update", "embedding", about="beta1 0.8, not 0.9", earliest=2),  # Adam's first step has no past
}
HEALTHY: dict[str, dict[str, Any]] = {
    "2 ranks for 4": {"ranks": 2},
    "other buckets": {"bucket": 0.05},
    "2 threads": {"threads": 2},
    "accumulates": {"ranks": 2, "accumulation": 2},
    "8 ranks for 4": {"ranks": 8},
}


@dataclass(frozen=True)
class Job:
    """One training."""

    output: str
    seed: int
    steps: int
    ranks: int = 4
    accumulation: int = 1
    bucket: float = 25.0
    threads: int = 1
    fault: str = ""
    since: int = 1


def main(
    seeds: Annotated[int, typer.Option(help="of the trainings, for each fault", min=0)] = 3,
    healthy: Annotated[int, typer.Option(help="seeds of each kind of healthy pair", min=0)] = 6,
    steps: Annotated[int, typer.Option(help="of each training", min=4)] = 10,
    first: Annotated[int, typer.Option(help="the first seed", min=1)] = 1,
    fault: Annotated[list[str] | None, typer.Option(help="only this; may be given several times")] = None,
    keep: Annotated[Path | None, typer.Option(help="where the traces stay")] = None,
) -> None:
    """Train, compare, and print both tables."""
    chosen = {name: FAULTS[name] for name in fault or FAULTS}
    folder = keep or Path(tempfile.mkdtemp(prefix="ds_silent_parting_"))
    jobs: dict[str, Job] = {}
    for seed in range(first, first + max(seeds, healthy)):
        jobs[f"a{seed}"] = Job(str(folder / f"a{seed}"), seed, steps)
        for number, name in enumerate(chosen if seed < first + seeds else ()):
            since = 1 if chosen[name].always else 1 + (seed + number) % (steps - 2)
            accumulation = 2 if name == "accumulation" else 1
            ranks = 4 if (seed + number) % 2 else 2
            where = str(folder / f"{name}{seed}")
            jobs[f"{name}{seed}"] = Job(where, seed, steps, ranks, accumulation, fault=name, since=since)
        for kind, changes in HEALTHY.items() if seed < first + healthy else ():
            place = folder / f"healthy {kind} {seed}"
            jobs[f"{kind}{seed}"] = Job(str(place), seed, steps, **changes)
    started = time.monotonic()
    for done, _ in enumerate(trained(list(jobs.values())), 1):
        if not done % 20 or done == len(jobs):
            CONSOLE.print(f"{done} of {len(jobs)} trainings, {time.monotonic() - started:.0f} s")
    wrong = faults_table(chosen, jobs, range(first, first + seeds))
    wrong += healthy_table(jobs, range(first, first + healthy))
    if keep is None:
        shutil.rmtree(folder)
    raise typer.Exit(1 if wrong else 0)


def faults_table(chosen: dict[str, Fault], jobs: dict[str, Job], seeds: range) -> int:
    """Print how often each fault was found as it is; the number of those that were not."""
    table = Table(title=f"Faults, {len(seeds)} seeds: a GPT of 106,240 parameters in fp32, A on 4 ranks, B on 4 or 2")
    for column in ("fault", "what it is", "link", "layer", "step", "link right", "layer right", "all right"):
        table.add_column(column, justify="left" if column in ("fault", "what it is", "link", "layer") else "right")
    wrong = 0
    for name, fault in chosen.items() if seeds else ():
        right: dict[str, int] = defaultdict(int)
        for seed in seeds:
            job = jobs[f"{name}{seed}"]
            found = ds_silent.compare(jobs[f"a{seed}"].output, job.output)
            link, step = found.link == fault.link, found.step == max(job.since, fault.earliest)
            layer = fault.layer is None or found.layer == fault.layer
            right["link"] += link
            right["step"] += step
            right["layer"] += layer
            right["all"] += link and step and layer
            if not (link and step and layer):
                CONSOLE.print(f"{name}, seed {seed}, since {job.since}: {found.sentence}", markup=False)
        wrong += len(seeds) - right["all"]
        counts = [f"{right[what]} of {len(seeds)}" for what in ("step", "link", "layer", "all")]
        table.add_row(name, fault.about, fault.link, fault.layer or "-", *counts)
    if seeds:
        CONSOLE.print(table)
    return wrong


def healthy_table(jobs: dict[str, Job], seeds: range) -> int:
    """Print how many healthy pairs parted, and how near the others came."""
    table = Table(title=f"Healthy pairs, {len(seeds)} seeds each")
    for column in ("B has", "parted", "largest share of what is allowed"):
        table.add_column(column, justify="left" if column == "B has" else "right")
    wrong = 0
    for kind in HEALTHY if seeds else ():
        parted, share = 0, 0.0
        for seed in seeds:
            found = ds_silent.compare(jobs[f"a{seed}"].output, jobs[f"{kind}{seed}"].output)
            parted += found.parted
            share = max(share, *(one.share for one in found.links if one.link not in ("rows", "rates")))
            if found.parted:
                CONSOLE.print(f"{kind}, seed {seed}: {found.sentence}", markup=False)
        wrong += parted
        table.add_row(kind, f"{parted} of {len(seeds)}", f"{share:.0%}")
    if seeds:
        CONSOLE.print(table)
    return wrong


# -- the trainings -----------------------------------------------------------------------------------------------------


def trained(jobs: list[Job]) -> Iterator[str]:
    """Train all of them, those with as many ranks in one start of the ranks; yield each as it ends."""
    for ranks in sorted({job.ranks for job in jobs}):
        some = [json.dumps(asdict(job)) for job in jobs if job.ranks == ranks]
        yield from on_ranks(work, (some,), ranks)


def work(send: Any, jobs: list[str]) -> None:
    """On every rank."""
    for text in jobs:
        job = Job(**json.loads(text))
        train(job)
        send(job.output)


def train(job: Job) -> None:
    """One training of a rank, as a script writes it; ``job.fault`` is put in where a bug of the script would be."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ds_silent.practice.model import LENGTH, VOCABULARY, PracticeModel

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    model = PracticeModel()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if job.fault == "initial":
        with torch.no_grad():
            model.embedding.weight.add_(1e-3)
    active = [job.fault if job.since == 1 else ""]
    for name, parameter in model.named_parameters():
        if name.startswith(f"{LAYER}.") and parameter.requires_grad:
            parameter.register_hook(lambda g, name=name: changed(g, name, active[0]))
    ddp = DistributedDataParallel(model, bucket_cap_mb=job.bucket)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    block = {
        "output_dir": job.output,
        "tensorboard": False,
        "trace": {"interval": 1},
        "direction": {"sketch_size": 1024},
        "detectors": {"enabled": False},
        "integrity": {"replica_interval": 0},
    }
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = ROWS // ranks // job.accumulation
    with ds_silent.observe(ddp, optimizer, config=block, accumulation=job.accumulation):
        for step in range(1, job.steps + 1):
            fault = active[0] = job.fault if step >= job.since else ""
            generator = torch.Generator().manual_seed(1000 * job.seed + step)
            rows = torch.randint(1, VOCABULARY, (ROWS + 1, LENGTH), generator=generator)
            rows[:, 1::2] = (rows[:, ::2] * 7 + 3) % VOCABULARY
            if fault == "row" and step == job.since:
                rows[3] = rows[ROWS]
            for micro in range(job.accumulation):
                begin = (rank * job.accumulation + micro) * share
                mine = rows[begin : begin + share]
                ddp.require_backward_grad_sync = micro == job.accumulation - 1
                loss = ddp(mine, mine)
                divided = 1 if fault == "accumulation" else job.accumulation
                (loss / divided * (0.5 if fault == "loss-halved" else 1.0)).backward()
            clip = 0.25 if fault == "clipping" else 0.5
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if fault == "changed":
                for name, parameter in model.named_parameters():
                    if name.startswith(f"{LAYER}.") and parameter.grad is not None:
                        parameter.grad.mul_(1.01)
            for group, settings in enumerate(optimizer.param_groups):
                settings["lr"] = 1.1e-3 if fault == "rate" else 1e-3
                settings["eps"] = 1e-6 if fault == "epsilon" else 1e-8
                settings["betas"] = (0.8 if fault == "momentum" else 0.9, 0.999)
                settings["weight_decay"] = 0.01 if group == 0 or fault == "decay" else 0.0
            optimizer.step()
            optimizer.zero_grad()
            if fault == "masters":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(parameter.bfloat16())


def changed(gradient: Any, name: str, fault: str) -> Any:
    """A layer's local gradient as a fault makes it."""
    if fault == "layer-scaled":
        return gradient * 1.001
    return -gradient if fault == "sign" and name.endswith("up.bias") else gradient


if __name__ == "__main__":
    typer.run(main)
