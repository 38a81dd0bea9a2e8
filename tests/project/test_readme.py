"""Every command that the documentation names is run: by a test that is named here, or as it stands by `make readme`."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import typer

from tests.support.pages import PAGES, ROOT, commands

RUN_BY: dict[str, str] = {
    "make demo": "tests/launch/test_demo.py",
    "make test": "tests/project/test_readme.py",  # you are in it
    "make test-all": "tests/project/test_readme.py",
    "make help": "tests/project/test_readme.py",
    "torchrun --nproc_per_node 8 -m ds_silent --silent-consistency-config block.json pretrain_gpt.py ...": (
        "tests/frameworks/test_auto_attach.py"  # a script of its own, 4 ranks
    ),
    "make test-matrix": "tests/frameworks/test_oracle.py",
    "make readme": "tests/project/test_readme.py",
    "pip install .": ".ci/test_package.sh",
    'pip install ".[deepspeed]"': ".ci/test_package.sh",
    "make test-package": ".ci/test_package.sh",  # it is that script and nothing else, see the Makefile
    "python benchmarks/mesh_param_drift.py": "tests/frameworks/test_deepspeed_shapes.py",
    "make house": "tests/project/test_house.py",
    "make docs": "tests/commands/test_block_table.py",
    "make test-real-bugs": "benchmarks/real_bugs.py",  # and released_bugs.py: nothing else, see the Makefile
    "make test-versions": "benchmarks/versions.py",  # so is this, an hour on a machine that has every Python
    "python benchmarks/versions.py --page docs/versions.md": "benchmarks/versions.py",
    "deepspeed --num_gpus 8 --module ds_silent train.py ...": "tests/frameworks/test_ways_in.py",
    "torchrun --nproc_per_node 8 -m ds_silent train.py ...": "tests/frameworks/test_ways_in.py",
    "python -m ds_silent -m package.module ...": "tests/frameworks/test_ways_in.py",
    "python -m ds_silent train.py": "tests/frameworks/test_ways_in.py",
    "launch/train.py": "tests/launch/test_train.py",
    "torchrun --nproc_per_node 4 launch/examples/ddp.py": "tests/launch/test_examples.py",
    "torchrun --nproc_per_node 2 launch/examples/ddp.py": "tests/launch/test_examples.py",
    "deepspeed --num_gpus 4 launch/examples/deepspeed_loop.py": "tests/launch/test_examples.py",
    "torchrun --nproc_per_node 4 launch/examples/fsdp2.py": "tests/launch/test_examples.py",
    "torchrun --nproc_per_node 4 launch/examples/huggingface.py": "tests/integrations/test_huggingface.py",
    "torchrun --nproc_per_node 4 launch/examples/lightning_trainer.py": "tests/integrations/test_lightning.py",
    "torchrun --nproc_per_node 8 -m ds_silent -m trl.scripts.sft --deepspeed ds_config.json ...": (
        "tests/integrations/test_unchanged_scripts.py"
    ),
    "torchrun --nproc_per_node 8 -m ds_silent run_clm.py --deepspeed ds_config.json ...": (
        "tests/integrations/test_unchanged_scripts.py"
    ),
    "launch/gpu.sh --dry-run": "tests/launch/test_scripts.py",
    "ds-silent check ds_config.json": "tests/commands/test_cli.py",
    "ds-silent check ds_config.json --world-size 1024": "tests/commands/test_forecast.py",
    "ds-silent alert --test env:SLACK_URL": "tests/alerts/test_commands.py",
    "ds-silent watch runs/my-run --alert env:SLACK_URL": "tests/alerts/test_commands.py",
    "ds-silent doctor": "tests/commands/test_doctor.py",
    "ds-silent compare runs/a runs/b": "tests/comparison/test_command.py",
    "ds-silent compare runs/a runs/b runs/a-again": "tests/comparison/test_command.py",
    "ds-silent compare --golden runs/golden runs/new --assert --json compare.json --junit compare.xml": (
        "tests/comparison/test_command.py"
    ),
    "ds-silent compare --curves runs/a runs/b": "tests/runs/test_curves.py",
    "ds-silent bisect deepspeed --good 0.18.3 --bad 0.19.8 -- torchrun --nproc_per_node 2 -m ds_silent train.py": (
        "tests/commands/test_bisect.py"  # with a package of its own
    ),
    "ds-silent report runs/my-run": "tests/runs/report/test_report.py",
    "ds-silent report runs/monday runs/tuesday -o both.html": "tests/runs/report/test_report.py",
    "ds-silent schema block": "tests/commands/test_schema.py",
    "ds-silent schema metrics": "tests/commands/test_schema.py",
    "ds-silent schema events": "tests/commands/test_schema.py",
    "ds-silent numerics --gradients gradients/": "tests/numerics/test_numerics.py",
    "ds-silent watch runs/my-run": "tests/runs/watch/test_terminal.py",
    "tensorboard --logdir runs/my-run/tensorboard": "tests/project/test_readme.py",
}
"""What a part of the usual tests runs: command -> file in which it does."""

FINE_TUNE = "deepspeed launch/train.py "
"""The paper's run needs the paper's model and eight devices: its options are parsed, the embedded model trains."""

SLOW: dict[str, float] = {
    "ds-silent drill": 30,
    "python benchmarks/report_scale.py --steps 100000 --ranks 1024": 5,
    "make demo-megatron": 20,
    "make works": 60,
    "make scale": 40,
    "make nodes": 20,
    "make compare-releases": 60,
    "make compare-versions GOOD=0.18.3 BAD=0.19.8": 30,
    "python benchmarks/bandwidth.py": 2,
    "python benchmarks/overhead.py --device cuda": 2,
    "ds-silent drill --framework ddp": 30,
    "ds-silent drill --framework megatron": 40,
    "torchrun --standalone --nproc_per_node 2 benchmarks/fsdp2_factor.py": 2,
    "ds-silent numerics": 10,
    "pytest tests/ordered/test_ordered_training.py -m matrix": 30,
    "pytest tests/comparison/test_same_training.py -m matrix": 30,
    "python benchmarks/acts.py": 15,
    "python benchmarks/alerts.py --rounds 16 --steps 80": 15,
    "python benchmarks/detection.py --part false-alarms --ranks 4 --ranks 8 --steps 20000": 120,
    "python benchmarks/detection.py --part power": 120,
    "python benchmarks/detection.py --part power --rate 1 --rate 1e-3": 240,
    "python benchmarks/false_alarms.py --steps 100": 60,
    "python benchmarks/false_alarms.py --scratch --steps 600": 120,
    "python benchmarks/integrity.py": 60,
    "python benchmarks/metric_pictures.py": 20,
    "python benchmarks/scenarios.py": 30,
    "python benchmarks/ordered.py --part time --rounds 5": 30,
    "python benchmarks/overhead.py": 90,
    "python benchmarks/overhead.py --part trace --framework ddp --pairs 80": 30,
    "python benchmarks/overhead.py --ranks 4 --variant retry --variant majority": 180,
    "python benchmarks/paft.py --part bursts": 120,
    "python benchmarks/parting.py --seeds 20 --healthy 40": 60,
    "python benchmarks/paft.py --part noise": 120,
    "python benchmarks/real_bugs.py --survey": 90,
    "python benchmarks/watching.py": 5,
}
"""What takes minutes, and after how many of them, on two busy cores, it counts as hanging."""


def test_every_command_is_run_somewhere() -> None:
    named = {command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))}
    assert len(named) > 15
    unknown = {command for command in named if not command.startswith(FINE_TUNE)} - set(RUN_BY) - set(SLOW)
    assert not unknown, f"nothing runs {sorted(unknown)}: name the test that does in RUN_BY, or put it into SLOW"
    gone = (set(RUN_BY) | set(SLOW)) - named
    assert not gone, f"no page names {sorted(gone)} any more"
    for command, place in RUN_BY.items():
        assert (ROOT / place).is_file(), f"{place}, which should run {command}, is not there"


def test_options_of_the_fine_tune_are_known() -> None:
    import train

    known = typer.main.get_command(train.app)
    found = [c for page in PAGES for c in commands(page.read_text(encoding="utf-8")) if c.startswith(FINE_TUNE)]
    assert len(found) >= 2
    for command in found:
        options = known.make_context("train", shlex.split(command.removeprefix(FINE_TUNE))).params
        assert (ROOT / options["deepspeed_config"]).is_file()


def test_the_makefile_lists_its_commands() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {f"make {name}" for name in listed} >= {command for command in RUN_BY if command.startswith("make ")} - {
        "make help"
    }


def has_typer(command: str) -> bool:
    script = ROOT / command.split()[1]
    return script.suffix == ".py" and "typer.run(main)" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [command for command in sorted(SLOW) if has_typer(command)])
def test_options_of_the_benchmarks_are_known(command: str) -> None:
    """Without running them: a mistake here would be seen after hours."""
    script, *options = shlex.split(command.removeprefix("python "))
    main = runpy.run_path(str(ROOT / script), run_name="read")["main"]
    program = typer.Typer()
    program.command()(main)
    typer.main.get_command(program).make_context(script, options)


@pytest.mark.readme
@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=pytest.mark.timeout(60 * SLOW[command] + 60)) for command in sorted(SLOW)]
)
def test_as_it_stands(command: str, tmp_path: Path) -> None:
    """From the project's directory, as the page says."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        done = subprocess.run(
            shlex.split(command),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=60 * SLOW[command],
        )
    said = output.read_text(errors="replace")
    assert done.returncode == 0, said[-5000:]
    assert "Traceback (most recent call last)" not in said, said[-5000:]
    print(said[-10000:])


@pytest.mark.readme
def test_tensorboard_opens_on_a_run(tmp_path: Path) -> None:
    from ds_silent.sinks import open_files
    from tests.sinks.example_records import full_record

    sinks = open_files(tmp_path, tensorboard=True)
    sinks.write(full_record())
    sinks.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).parent / "tensorboard"
    server = subprocess.Popen(
        [program, "--logdir", tmp_path / "tensorboard", "--port", str(port), "--host", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        tags = ""
        deadline = time.monotonic() + 90
        while "silent/loss/mean" not in tags and time.monotonic() < deadline:
            time.sleep(1)
            with contextlib.suppress(OSError):  # not up yet
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=10)
                tags = page.read().decode()
        assert "silent/loss/mean" in tags
    finally:
        server.terminate()
        server.wait(30)
