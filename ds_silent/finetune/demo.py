"""The demonstration: five scenarios in one group of CPU ranks, then a table, a picture and two sentences.

Started as ``launch/demo.py``, it launches itself with torchrun as the ranks' worker, because starting a rank costs
seconds: all scenarios share one process group.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ds_silent.finetune.demo_report import CASES, Case, report
from ds_silent.finetune.settings import CONFIGS, Settings, checked

RANKS = 4
STEPS = 30
OUTPUT = Path("runs/demo")
WORKER = "--worker"
MICRO_BATCH = 4


def main(arguments: list[str]) -> int:
    """The process's exit code; ``arguments`` as in ``sys.argv``."""
    if WORKER in arguments[1:]:
        return _worker()
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    for case in CASES:
        shutil.rmtree(OUTPUT / case.name, ignore_errors=True)
    print(
        f"demo: {len(CASES)} scenarios x {STEPS} steps on {RANKS} CPU ranks, into {OUTPUT} (some minutes) ...",
        flush=True,
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), arguments[0], WORKER]
    code = subprocess.run([sys.executable, *launch], env=environment, check=False).returncode
    if code:
        print(f"demo: the training ended with exit code {code}; its reason stands above", file=sys.stderr)
        return code
    report(OUTPUT)
    _write_page()
    return 0


def _write_page() -> None:
    """All scenarios side by side; what goes wrong with it is said, and the demonstration has still run."""
    from ds_silent.reading.run import ReadingError
    from ds_silent.report import write_report

    try:
        page, _ = write_report([OUTPUT / case.name for case in CASES], OUTPUT / "report.html")
    except ReadingError as error:
        print(f"demo: {error}", file=sys.stderr)
        return
    print(f"report:      {page} (open it in a browser, or: python -m webbrowser -t {page})")


def _worker() -> int:
    import torch.distributed as dist

    from ds_silent.finetune.ranks import join
    from ds_silent.finetune.sampler import epoch_coverage
    from ds_silent.finetune.scenarios import rank_seed
    from ds_silent.finetune.trainer import train

    ranks = join()
    for number, case in enumerate(CASES, start=1):
        if ranks.is_first:
            print(f"demo: {number} of {len(CASES)}: {case.title}", flush=True)
        settings = checked(_settings(case))
        outcome = train(settings, ranks)
        if outcome.stopped:
            break
        if ranks.is_first:
            seeds = [rank_seed(case.scenario, settings.seed, rank) for rank in range(ranks.world_size)]
            coverage = epoch_coverage(outcome.plan, seeds)
            (settings.output / "coverage.json").write_text(json.dumps({"epoch": coverage}) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 1 if outcome.stopped else 0


def _settings(case: Case) -> Settings:
    return Settings(
        template="alpaca-with-input",  # what the embedded model was warmed up on
        scenario=case.scenario,
        sampler=case.sampler,
        output=OUTPUT / case.name,
        deepspeed_config=str(CONFIGS / "ds_cpu_demo.json"),
        micro_batch=MICRO_BATCH,
        accumulation=1,
        max_steps=STEPS,
        save_model=False,
        log_every=STEPS,
    )
