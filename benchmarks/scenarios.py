"""The paper's scenarios side by side, as docs/curves.md shows them: what `ds-silent compare --curves` says of each.

python benchmarks/scenarios.py           # trains seven times on 4 CPU ranks, some minutes, then prints the table
python benchmarks/scenarios.py --table   # prints it again from what runs/scenarios holds

Each training is compared with the first, S1-1 sharded. The second is the same with another seed: none of its metrics
should differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from metric_pictures import RANKS, settings_of, train

from ds_silent.runs.curves import CurveDifference, compare_curves

STEPS, SEED = 120, 42
RECORDS = Path("runs/scenarios")
SHOWN = ("loss std", "norm std", "cosine mean")
EPOCH = "epoch.json"
CASES: tuple[tuple[Any, Any, int], ...] = (
    ("s1-1", "sharded", SEED),
    ("s1-1", "sharded", SEED + 1),
    ("s1-2", "sharded", SEED),
    ("s1-3", "sharded", SEED),
    ("s1-1", "replicated", SEED),
    ("s1-2", "replicated", SEED),
    ("s1-3", "replicated", SEED),
)


def directory(scenario: str, sampler: str, seed: int) -> Path:
    return RECORDS / f"{sampler}-{scenario}-{seed}"


def worker() -> None:
    import torch.distributed as dist

    from finetune import trainer
    from finetune.ranks import join
    from finetune.sampler import epoch_coverage
    from finetune.scenarios import rank_seed

    ranks = join()
    for scenario, sampler, seed in CASES:
        output = directory(scenario, sampler, seed)
        settings = settings_of(output, STEPS, scenario=scenario, sampler=sampler, seed=seed)
        plan = trainer.train(settings, ranks).plan
        if ranks.is_first:
            visited = epoch_coverage(plan, [rank_seed(scenario, seed, rank) for rank in range(RANKS)])
            (output / EPOCH).write_text(json.dumps(visited), encoding="utf-8")
    dist.destroy_process_group()


def table() -> None:
    print(f"| scenario | {' | '.join(SHOWN)} | % of rows visited |\n|{'---|' * (len(SHOWN) + 2)}")
    for scenario, sampler, seed in CASES:
        found = {one.metric: one for one in compare_curves(directory(*CASES[0]), directory(scenario, sampler, seed))}
        title = f"{scenario.upper()} {sampler}{f', seed {seed}' if seed != SEED else ''}"
        visited = float((directory(scenario, sampler, seed) / EPOCH).read_text(encoding="utf-8"))
        print(f"| {title} | {' | '.join(cell(found[name]) for name in SHOWN)} | {100 * visited:.1f} |")


def cell(one: CurveDifference) -> str:
    """Return the mean, bold where it differs from the first training's, and the interval of the difference."""
    if one.verdict == "the same":
        return f"{one.mean_b:.3f}"
    if one.verdict == "too few steps":
        return f"{one.mean_b:.3f} (needs {one.needed} steps)"
    mark = "**" if one.verdict in ("higher in B", "lower in B") else ""
    return f"{mark}{one.mean_b:.3f}{mark} ({one.low:+.3f}..{one.high:+.3f})"


def main(arguments: list[str]) -> int:
    if arguments == ["--worker"]:
        worker()
        return 0
    if arguments != ["--table"] and (code := train(RECORDS, __file__)):
        return code
    table()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
