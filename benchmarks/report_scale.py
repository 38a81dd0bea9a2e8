"""How long the report of a long run of many ranks takes, and how large its page is.

python benchmarks/report_scale.py --steps 100000 --ranks 1024 --directory /tmp/long-run

Writes the records that such a run leaves - a rank that goes wrong for a while, one step at which another jumps, events
that are told again and again - without training, and then the page. Records that are there already are used again.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import time
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ds_silent.runs.report import write_report
from ds_silent.sinks.per_rank import MAGIC, MARK, VERSION

HOST = 8  # ranks on one
BAD, JUMP = 37, 5  # ranks; of fewer than 64, the last and the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--directory", type=Path, default=Path("runs/report-scale"))
    given = parser.parse_args()
    run = given.directory / f"{given.steps}x{given.ranks}"
    if not (run / "metrics.jsonl").exists():
        began = time.perf_counter()
        make_run(run, given.steps, given.ranks)
        print(f"made in {time.perf_counter() - began:.1f} s: {size_of(run) / 1e6:,.0f} MB of records")
    began, cpu = time.perf_counter(), time.process_time()
    page, verdicts = write_report([run], given.directory / "report.html")
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(verdicts[0].sentence)
    print(f"page: {page.stat().st_size / 1e6:.2f} MB in {wall:.1f} s ({cpu:.1f} s of a core), peak {peak:,.0f} MiB")


def make_run(directory: Path, steps: int, ranks: int, seed: int = 0) -> None:
    """The records of a run as :mod:`ds_silent.sinks` writes them, above 64 ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    bad, jump = BAD % ranks, JUMP % ranks
    begin, at = int(steps * 0.6), int(steps * 0.3)
    names = ("min", "q10", "q25", "median", "q75", "q90", "max")
    places = [round(share * (ranks - 1)) for share in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)]
    pool = random.standard_normal((64, 3, ranks)).astype(np.float32)  # drawn once: what is timed is not the making
    paths = (directory / name for name in ("metrics.jsonl", "scores.jsonl", "per_rank.bin"))
    with ExitStack() as stack:
        metrics, scores = (stack.enter_context(open(next(paths), "w")) for _ in range(2))
        raw = stack.enter_context(open(next(paths), "wb"))
        raw.write(struct.pack("<8sII", MAGIC, VERSION, 0))
        for step in range(1, steps + 1):
            values = pool[step % 64] * np.array([[0.2], [0.1], [0.02]], dtype=np.float32)
            values += np.array([[2 + 3 / (1 + step / 500)], [1.0], [0.1]], dtype=np.float32)
            if step >= begin:
                values[1, bad] *= 1.5
            if step == at:
                values[0, jump] = 40.0
            data = values.astype("<f4").tobytes()
            head = struct.pack("<4sIIIQI", MARK, ranks, 7, zlib.crc32(data), step, 0)
            raw.write(head + struct.pack("<I", zlib.crc32(head)) + data)
            order = np.argsort(values, axis=1)
            metrics.write(json.dumps(record(step, ranks, values, order, names, places)) + "\n")
            scores.write(json.dumps(judged(step, begin, bad)) + "\n")
    with open(directory / "events.jsonl", "w") as events:
        events.write(json.dumps(event(at, jump, "loss", "Rank {} jumped.")) + "\n")
        told, wait = begin + 8, 128
        events.write(json.dumps(event(told, bad, "gradient norm", "Rank {} has larger gradients.")) + "\n")
        while (told := told + wait) < steps:
            wait *= 2
            text = f"Still, since step {begin + 8}: rank {{}} has larger gradients."
            events.write(json.dumps(event(told, bad, "gradient norm", text) | {"phase": "ongoing"}) + "\n")
    each = [
        {
            "rank": n,
            "global_rank": n,
            "host": f"node{n // HOST:04}",
            "local_rank": n % HOST,
            "device": f"cuda:{n % HOST}",
        }
        for n in range(ranks)
    ]
    (directory / "ranks.json").write_text(json.dumps({"version": 1, "world_size": ranks, "ranks": each}))


def record(step, ranks, values, order, names, places):  # type: ignore[no-untyped-def]
    """A line of metrics.jsonl."""

    def stats(row: int) -> dict[str, object]:
        ordered = values[row][order[row]]
        ends = [*order[row][:8].tolist(), *order[row][-8:].tolist()]
        return {
            "per_rank": None,
            "quantiles": dict(zip(names, ordered[places].astype(float).tolist(), strict=True)),
            "extremes": {str(rank): float(values[row][rank]) for rank in ends},
        }

    mean, std = values.mean(axis=1).tolist(), values.std(axis=1).tolist()
    return {
        "step": step,
        "samples": step * ranks * 4,
        "epoch": step / 1000,
        "world_size": ranks,
        "loss": {"mean": mean[0], "std": std[0], "range": 1.0, **stats(0)},
        "grad_norm": {"method": "sketch", "mean": mean[1], "std": std[1], "cv": 0.1, "aggregated": 0.4, **stats(1)},
        "direction": {"method": "sketch", "mean_cosine": mean[2], "standard_error": 0.001, **stats(2)},
        "noise_scale": 36.0 + 5 * mean[2],
        "coverage": {"duplicates": 0, "seen": step / 1000 % 1, "repeated": 0.0},
        "integrity": {"relative_error": 0.001, "rounding_bound": 0.007, "replica_groups": None},
        "seconds": {"step": 5.0, "observe": 0.02},
    }


def judged(step: int, begin: int, bad: int) -> dict[str, object]:
    """A line of scores.jsonl."""
    outlier = {"detector": "outlier", "score": min(20.0, max(step - begin, 0) * 2.0), "threshold": 16.65, "rank": bad}
    rounding = {"detector": "rounding", "score": 0.001, "threshold": 0.007, "where": "aggregated gradient"}
    applied = {"detector": "rounding", "score": 1e-8, "threshold": 5e-7, "where": "applied gradient"}
    return {"step": step, "scores": [outlier, rounding, applied]}


def event(step: int, rank: int, where: str, message: str) -> dict[str, object]:
    """A line of events.jsonl."""
    return {
        "step": step,
        "kind": "outlier-rank",
        "severity": "error",
        "ranks": [rank],
        "where": where,
        "score": 17.0,
        "threshold": 16.65,
        "message": message.format(rank),
        "remedy": "Look at its host.",
    }


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


if __name__ == "__main__":
    main()
