"""The demonstration: five scenarios in one group of CPU ranks, then a table, a picture and two sentences.

python launch/demo.py            # what `make demo` runs; results in runs/demo
python launch/demo.py --verbose  # with all that the ranks say, which else goes to runs/demo/console.log

It launches itself with torchrun as the ranks' worker, because starting a rank costs seconds: all scenarios share one
process group. A row of the table is printed as its scenario ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from demo_report import CASES, Case, heading, read_curves, report, row_of, table_of
from finetune.settings import CONFIGS, Settings, checked

RANKS = 4
STEPS = 30
OUTPUT = Path("runs/demo")
SAID = "console.log"
WORKER, VERBOSE = "--worker", "--verbose"
MICRO_BATCH = 4
LINES_SHOWN = 20  # of what the ranks have said, where they fail
_ENDED = "demo: ended "


def main(arguments: list[str]) -> int:
    """The process's exit code; ``arguments`` as in ``sys.argv``."""
    script, *options = arguments
    if options == [WORKER]:
        return _worker()
    if options not in ([], [VERBOSE]):
        print(f"demo: the only option is {VERBOSE}, got {' '.join(options)}", file=sys.stderr)
        return 2
    for case in CASES:
        shutil.rmtree(OUTPUT / case.name, ignore_errors=True)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    print(
        f"demo: {len(CASES)} scenarios x {STEPS} steps on {RANKS} CPU ranks, into {OUTPUT} (some minutes) ...",
        flush=True,
    )
    try:
        code = _loud(script) if options else _quiet(script)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    if code:
        where = "above" if options else f"in {OUTPUT / SAID}, and its end above"
        print(f"demo: the training ended with exit code {code}; its reason stands {where}", file=sys.stderr)
        return code
    report(OUTPUT)
    _write_page()
    return 0


def _loud(script: str) -> int:
    """Everything as it comes, then the table."""
    with _ranks(script) as process:
        code = process.wait()
    if code == 0:
        print(table_of({case: read_curves(OUTPUT / case.name) for case in CASES}))
    return code


def _quiet(script: str) -> int:
    """The table, row by row."""
    last: deque[str] = deque(maxlen=LINES_SHOWN)
    waiting = {case.name: case for case in CASES}
    console = Console(highlight=False)
    log = (OUTPUT / SAID).open("w", encoding="utf-8")
    with log, _ranks(script, subprocess.PIPE) as process, console.status("") as status:
        assert process.stdout is not None
        print(heading(), flush=True)
        for line in process.stdout:
            if not line.startswith(_ENDED):
                log.write(line)
                last.append(line)
            elif case := waiting.pop(line.removeprefix(_ENDED).strip(), None):
                console.print(row_of(case, read_curves(OUTPUT / case.name)), markup=False, soft_wrap=True)
            if waiting:  # shown on a terminal only
                status.update(f"{len(CASES) - len(waiting) + 1} of {len(CASES)}: {next(iter(waiting.values())).title}")
        code = process.wait()
    if code:
        sys.stderr.writelines(last)
    return code


@contextmanager
def _ranks(script: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """The training; it is left neither running nor unwaited for."""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), script, WORKER]
    process = subprocess.Popen(
        [sys.executable, *launch],
        env=environment,
        stdout=stdout,
        stderr=None if stdout is None else subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
        process.wait()


def _write_page() -> None:
    """All scenarios side by side; what goes wrong with it is said, and the demonstration has still run."""
    from ds_silent.runs.report import write_report
    from ds_silent.runs.run import ReadingError

    try:
        page, _ = write_report([OUTPUT / case.name for case in CASES], OUTPUT / "report.html")
    except ReadingError as error:
        print(f"demo: {error}", file=sys.stderr)
        return
    print(f"report:      {page} (open it in a browser, or: python -m webbrowser -t {page})")


def _worker() -> int:
    import torch.distributed as dist

    from finetune.ranks import join
    from finetune.sampler import epoch_coverage
    from finetune.scenarios import rank_seed
    from finetune.trainer import train

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
            print(f"{_ENDED}{case.name}", flush=True)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv))
