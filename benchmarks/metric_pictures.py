"""The pictures of docs/curves.md: each metric in a healthy, a duplicated and a corrupted training, from their records.

python benchmarks/metric_pictures.py          # trains for some minutes on 4 CPU ranks, then draws into docs/pictures
python benchmarks/metric_pictures.py --draw   # draws again what runs/metric_pictures holds

The embedded model is fine-tuned. Duplicated: all ranks hold the same rows. Corrupted: from step SHUFFLED on
the labels of rank BAD are in another order, and at the steps LOST its gradient does not arrive in the reduction. What
that cannot show, rows that come again, a fourth training does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # the fine-tune's modules
RANKS, STEPS = 4, 60
BAD, SHUFFLED, LOST = 2, 25, range(45, 49)
RECORDS = Path("runs/metric_pictures")
PICTURES = Path("docs/pictures")
TITLES = {
    "healthy": "healthy",
    "duplicated": "duplicated: all ranks hold the same rows",
    "corrupted": f"corrupted: rank {BAD}, from step {SHUFFLED} on",
    "own-seeds": "each rank shuffles with its own seed",
}
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#009e73")  # of the ranks; apart for colour-blind eyes too


# -- the trainings -----------------------------------------------------------------------------------------------------


def worker() -> None:
    import torch.distributed as dist

    from finetune import trainer
    from finetune.ranks import join

    ranks = join()
    for name in TITLES:
        scenario = "s1-3" if name == "own-seeds" else "s1-1"
        sampler = "replicated" if name == "duplicated" else "sharded"
        settings = settings_of(RECORDS / name, STEPS, scenario=scenario, sampler=sampler)
        with corrupted(trainer, name == "corrupted" and ranks.rank == BAD):
            trainer.train(settings, ranks)
    dist.destroy_process_group()


def settings_of(output: Path, steps: int, **of_the_rows: Any) -> Any:
    """Return the fine-tune's settings for the embedded model on CPU ranks."""
    from finetune.settings import CONFIGS, Settings, checked

    return checked(
        Settings(
            template="alpaca-with-input",
            output=output,
            deepspeed_config=str(CONFIGS / "ds_cpu_demo.json"),
            micro_batch=4,
            accumulation=1,
            max_steps=steps,
            save_model=False,
            log_every=steps,
            **of_the_rows,
        )
    )


@contextmanager
def corrupted(trainer: Any, here: bool) -> Iterator[None]:
    """On the rank that is struck: its labels, and what it gives to DeepSpeed's reduction."""
    import deepspeed.comm
    import torch

    if not here:
        yield
        return
    collate, all_reduce, step = trainer.collate, deepspeed.comm.all_reduce, 0

    def with_other_labels(*arguments: Any) -> Any:
        nonlocal step
        step += 1
        batch = collate(*arguments)
        if step < SHUFFLED:
            return batch
        labels = batch.labels.clone()
        for row in labels:
            places = (row != -100).nonzero().flatten()
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(step))
            row[places] = row[places[order]]
        return replace(batch, labels=labels)

    def lost(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if step in LOST and tensor.numel() > 1000:  # a bucket of gradients, and no small agreement
            tensor.zero_()
        return all_reduce(tensor, *arguments, **named)

    trainer.collate, deepspeed.comm.all_reduce = with_other_labels, lost
    try:
        yield
    finally:
        trainer.collate, deepspeed.comm.all_reduce = collate, all_reduce


def train(records: Path, script: str) -> int:
    """Run the script's ``--worker`` on all ranks, with no earlier records."""
    shutil.rmtree(records, ignore_errors=True)
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), script, "--worker"]
    return subprocess.run([sys.executable, *launch], env=environment, check=False).returncode


# -- the pictures ------------------------------------------------------------------------------------------------------


def loss(axis: Any, records: list[Any]) -> None:
    _of_ranks(axis, records, lambda r: r.loss.per_rank)
    axis.set_ylabel("loss of each rank")


def norm(axis: Any, records: list[Any]) -> None:
    _of_ranks(axis, records, lambda r: r.grad_norm.per_rank)
    axis.set_ylabel("gradient norm of each rank")


def cosine(axis: Any, records: list[Any]) -> None:
    steps = [r.step for r in records]
    lowest, highest = [r.direction.min_cosine for r in records], [r.direction.max_cosine for r in records]
    axis.fill_between(steps, lowest, highest, color="#56b4e9", alpha=0.35, label="lowest to highest pair", linewidth=0)
    axis.plot(steps, [r.direction.mean_cosine for r in records], color="#0072b2", label="mean of all pairs")
    axis.plot(
        steps, [r.direction.per_rank[BAD] for r in records], color=COLOURS[BAD], label=f"rank {BAD}, with the others"
    )
    axis.set_ylabel("cosine")
    axis.set_ylim(-0.35, 1.05)


def noise_scale(axis: Any, records: list[Any]) -> None:
    from statistics import median

    steps, values = [r.step for r in records], [r.noise_scale for r in records]
    smooth = [median(values[max(0, end - 15) : end]) for end in range(1, len(values) + 1)]
    axis.plot(steps, values, ".", color="#999999", markersize=4, label="one step")
    axis.plot(steps, smooth, color="#0072b2", label="median of 15 steps")
    axis.set_yscale("symlog", linthresh=10)
    axis.set_ylabel("noise scale, samples")


def integrity(axis: Any, records: list[Any]) -> None:
    steps = [r.step for r in records]
    errors = [r.integrity.relative_error for r in records]
    axis.plot(steps, errors, color="#d55e00", label="error of the reduction")
    axis.plot(
        steps, [r.integrity.rounding_bound for r in records], "--", color="#333333", label="what rounding explains"
    )
    axis.set_yscale("log")
    axis.set_ylabel("relative error")


def coverage(axis: Any, records: list[Any]) -> None:
    steps = [r.step for r in records]
    axis.plot(steps, [100 * r.coverage.seen for r in records], color="#0072b2", label="rows seen, % of the epoch")
    taken = [100 * r.epoch for r in records]
    axis.plot(steps, taken, "--", color="#333333", label="rows taken, %")
    axis.plot(steps, [r.coverage.duplicates for r in records], ".", color="#d55e00", label="rows on two or more ranks")
    axis.set_ylabel("rows")


DRAWN: tuple[Callable[[Any, list[Any]], None], ...] = (loss, norm, cosine, noise_scale, integrity, coverage)


def draw(records: dict[str, list[Any]], into: Path) -> None:
    """One picture for each metric: three trainings side by side on one scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    into.mkdir(parents=True, exist_ok=True)
    for metric in DRAWN:
        figure = Figure(figsize=(11, 3.1), layout="constrained")
        FigureCanvasAgg(figure)
        names = ("healthy", "duplicated", "own-seeds" if metric is coverage else "corrupted")
        axes = figure.subplots(1, len(names), sharey=True)
        for axis, name in zip(axes, names, strict=True):
            metric(axis, records[name])
            axis.set_title(TITLES[name], fontsize=10)
            axis.set_xlabel("optimizer step")
            axis.grid(alpha=0.3)
            axis.label_outer()
        handles, labels = axes[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
        figure.savefig(into / f"{metric.__name__}.png", dpi=80)


def _of_ranks(axis: Any, records: list[Any], values: Callable[[Any], Any]) -> None:
    styles = ("-", "--", "-", ":")  # where curves lie on each other, all of them are seen
    for rank in range(RANKS):
        curve = [values(record)[rank] for record in records]
        width = 2.2 if rank == BAD else 1.1
        axis.plot(
            [r.step for r in records], curve, styles[rank], color=COLOURS[rank], label=f"rank {rank}", linewidth=width
        )


def main(arguments: list[str]) -> int:
    if arguments == ["--worker"]:
        worker()
        return 0
    if arguments not in ([], ["--draw"]):
        print(f"metric_pictures: the only option is --draw, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    if not arguments and (code := train(RECORDS, __file__)):
        return code
    from ds_silent.sinks.jsonl import read_records

    draw({name: list(read_records(RECORDS / name / "metrics.jsonl")) for name in TITLES}, PICTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
