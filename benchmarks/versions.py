"""The tests under other versions of what ds_silent hooks into: which pass where, as one table.

    python benchmarks/versions.py                     # all: make test-versions (an hour, 20 GB of disk)
    python benchmarks/versions.py "torch 2.5" megatron        # those whose names hold one of these
    python benchmarks/versions.py --list                      # what there is
    python benchmarks/versions.py --page docs/versions.md     # writes the page, too
    python benchmarks/versions.py --kept --page docs/versions.md   # of what was measured last, and measures nothing

Every environment is made under build/versions on first use and kept: a virtual environment for each pair of Python and
torch, and one folder for each other package, put before it by PYTHONPATH. What has run on the same sources is not run
again (``--again`` does), so that a run that was broken off goes on. A Python that this machine lacks is a row that says
so. The exit status is 0 only when no test failed and none of the chosen environments was impossible to make.

torch comes from pip's own index; where there is no GPU to drive, set PIP_EXTRA_INDEX_URL to the index of its CPU
builds, which are ten times smaller.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ds_silent.comparison.releases import ImpossibleError, laid_over, pip_install

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "versions"
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
LIMIT_SECONDS = 1800

DEEPSPEED = ("tests/frameworks/test_applied.py",)
TORCH = ("tests/frameworks/test_ddp_faults.py",)
DDP_ONLY = (*TORCH, "-k", "not fully_shard")  # public from torch 2.6 on; 2.8 on gloo reduces to N times the mean
MEGATRON = ("tests/frameworks/test_megatron_faults.py",)
HUGGINGFACE = ("tests/integrations/test_huggingface.py",)

BASE = (
    *("numpy", "pydantic", "hjson", "safetensors", "tensorboard", "typer", "rich", "tqdm", "einops", "msgpack"),
    *("py-cpuinfo", "psutil", "ninja", "setuptools", "packaging", "pytest", "pytest-timeout", "transformers"),
    *("accelerate", "datasets", "tokenizers", "matplotlib"),
)
"""What the package and its tests need beside torch and what is laid over it."""


@dataclass(frozen=True)
class Environment:
    """One row of the table. Empty: what this environment itself has."""

    name: str
    options: tuple[str, ...]  # frameworks whose covering cases are judged one by one: benchmarks/works.py
    tests: tuple[str, ...]
    python: str = ""  # "3.12"
    torch: str = ""
    over: tuple[str, ...] = ()  # requirements laid over it, without their dependencies

    @property
    def is_own(self) -> bool:
        """Whether Python and torch are those that run this file."""
        return not self.python and not self.torch


def _old_hub(transformers: str, accelerate: str, tokenizers: str, hub: str) -> tuple[str, ...]:
    return (
        "datasets==3.6.0",
        f"transformers=={transformers}",
        f"accelerate=={accelerate}",
        f"tokenizers=={tokenizers}",
        f"huggingface_hub=={hub}",
    )


ALL = ("DDP", "FSDP2", "DeepSpeed")
ENVIRONMENTS = (
    Environment("DeepSpeed 0.16.9", ("DeepSpeed",), DEEPSPEED, over=("deepspeed==0.16.9",)),
    Environment("DeepSpeed 0.17.6", ("DeepSpeed",), DEEPSPEED, over=("deepspeed==0.17.6",)),
    Environment("DeepSpeed, this environment's", ("DeepSpeed",), DEEPSPEED),
    *(
        Environment(f"megatron-core {v}", ("Megatron-core",), MEGATRON, over=(f"megatron-core=={v}",))
        for v in ("0.15.3", "0.16.1")
    ),
    Environment(
        "transformers 4.57, accelerate 1.10", (), HUGGINGFACE, over=_old_hub("4.57.1", "1.10.1", "0.22.1", "0.36.0")
    ),
    Environment(
        "transformers 4.46, accelerate 1.0", (), HUGGINGFACE, over=_old_hub("4.46.3", "1.0.1", "0.20.3", "0.27.1")
    ),
    Environment("torch 2.4.1", ("DDP", "DeepSpeed"), DDP_ONLY, "3.10", "2.4.1", ("deepspeed==0.16.9",)),
    Environment("torch 2.5.1", ("DDP", "DeepSpeed"), DDP_ONLY, "3.11", "2.5.1", ("deepspeed==0.16.9",)),
    Environment("torch 2.8.0", ALL, DDP_ONLY, "3.12", "2.8.0", ("deepspeed==0.18.9",)),
    Environment("torch 2.15.0", ALL, TORCH, "3.13", "2.15.0", ("deepspeed==0.19.8",)),
)


@dataclass(frozen=True)
class Outcome:
    """What the tests said in one environment."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_ours: int = 0  # cases that are as wrong without the block
    seconds: float = 0.0
    versions: str = ""
    said: str = ""  # why nothing ran, or what is not right
    commit: str = ""  # what was checked out
    key: str = ""  # of the environment and the sources


# -- environments ------------------------------------------------------------------------------------------------------


def interpreter(environment: Environment) -> Path:
    """The Python that has this environment's torch; made on first use."""
    if environment.is_own:
        return Path(sys.executable)
    version = environment.python or OWN
    folder = CACHE / f"python{version}-torch{environment.torch}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    found = shutil.which(f"python{version}")
    asked = [found or "", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if found is None or subprocess.run(asked, capture_output=True, text=True).stdout.strip() != version:
        raise ImpossibleError(f"no python{version} on this machine's PATH")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([found, "-m", "venv", str(folder)], check=True)
    pip_install(python, f"torch=={environment.torch}", *BASE)
    (folder / "ready").touch()
    return python


def overlay(environment: Environment, python: Path) -> Path | None:
    """The folder that comes before the environment's own packages; made on first use."""
    if not environment.over:
        return None
    version = environment.python or OWN
    folder = CACHE / "-".join((f"over{version}", *(one.replace("==", "") for one in environment.over)))
    return laid_over(folder, environment.over, python)


# -- what runs in one --------------------------------------------------------------------------------------------------

_SAY_VERSIONS = """
import importlib.metadata as m, sys
names = ("torch", "deepspeed", "megatron-core", "transformers", "accelerate")
def of(name):
    try: return f"{name} {m.version(name)}"
    except m.PackageNotFoundError: return None
print(", ".join(filter(None, ["Python %d.%d" % sys.version_info[:2], *map(of, names)])))
"""


def run(environment: Environment) -> Outcome:
    """The tests in this environment."""
    started = time.monotonic()
    try:
        python = interpreter(environment)
        over = overlay(environment, python)
    except ImpossibleError as error:
        return Outcome(environment.name, seconds=time.monotonic() - started, said=str(error))
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (over, ROOT) if path is not None)
    variables["PATH"] = f"{python.parent}{os.pathsep}{variables['PATH']}"
    key = hashlib.sha256(repr(asdict(environment)).encode()).hexdigest()[:12]
    variables["TORCH_EXTENSIONS_DIR"] = str(CACHE / "extensions" / key)
    said = subprocess.run([python, "-c", _SAY_VERSIONS], env=variables, capture_output=True, text=True, cwd=ROOT)
    report = CACHE / f"{key}.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "900", "--junitxml", str(report)]
    options += ["-m", "not matrix and not readme"]  # long ones, too
    with (CACHE / f"{key}.log").open("w") as log:
        command = [str(python), "-m", "pytest", *options, *environment.tests]
        try:
            subprocess.run(command, env=variables, cwd=ROOT, stdout=log, stderr=log, timeout=LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {LIMIT_SECONDS} s\n")
    tested = _read(environment, report, said.stdout.strip(), time.monotonic() - started, CACHE / f"{key}.log")
    judged = [_judged(name, python, variables, CACHE / f"{key}-{name}") for name in environment.options]
    return replace(
        tested,
        passed=tested.passed + sum(right for right, _, _ in judged),
        failed=tested.failed + sum(len(wrong) for _, wrong, _ in judged),
        not_ours=sum(len(others) for *_, others in judged),
        seconds=time.monotonic() - started,
        said="\n".join(filter(None, [tested.said, *(one for _, *both in judged for part in both for one in part)])),
    )


def _judged(name: str, python: Path, variables: dict[str, str], out: Path) -> tuple[int, list[str], list[str]]:
    """Covering cases of a framework that are right; what is said of those that are not, by us, and without us too."""
    answers = out.with_suffix(".json")
    answers.unlink(missing_ok=True)
    command = [str(python), "benchmarks/works.py", "--options", name, "--json", str(answers)]
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(command, env=variables, cwd=ROOT, stdout=log, stderr=log, timeout=LIMIT_SECONDS, check=False)
    if not answers.exists():
        last = (out.with_suffix(".log").read_text().strip().splitlines() or ["nothing"])[-1]
        return 0, [f"{name}: {last[:200]}"], []
    wrong: list[str] = []
    others: list[str] = []
    right = 0
    for case, found in json.loads(answers.read_text()).items():
        noes = [question for question in ("bits", "numbers", "sums") if not found[question]]
        if noes:
            (wrong if found["ours"] else others).append(f"{name}, {case}: {', '.join(noes)} ({found['said']})")
        right += not noes
    return right, wrong, others


def _read(environment: Environment, report: Path, versions: str, seconds: float, log: Path) -> Outcome:
    if not report.exists():
        last = (log.read_text().strip().splitlines() or ["nothing"])[-1]
        return Outcome(environment.name, failed=1, seconds=seconds, versions=versions, said=f"{last} ({log})")
    suite = ET.parse(report).getroot().find("testsuite")  # written by the pytest that was started here
    assert suite is not None
    total, failed, skipped = (
        int(suite.get(name, 0)) + (int(suite.get("errors", 0)) if name == "failures" else 0)
        for name in ("tests", "failures", "skipped")
    )
    first = next((c for c in suite if c.find("failure") is not None or c.find("error") is not None), None)
    left_out = {str(one.get("message")): None for one in suite.iter("skipped")}
    said = "\n".join(f"skipped: {message[:200]}" for message in left_out)
    if first is not None:
        broken = first.find("failure")
        broken = broken if broken is not None else first.find("error")
        assert broken is not None
        lines = [line for line in (broken.text or "").splitlines() if line.startswith("E ")]
        told = f"{first.get('name')}: {(lines or [broken.get('message', '')])[-1][2:].strip()[:160]} ({log.name})"
        said = "\n".join(filter(None, [told, said]))
    return Outcome(
        environment.name, total - failed - skipped, failed, skipped, seconds=seconds, versions=versions, said=said
    )


# -- all of them -------------------------------------------------------------------------------------------------------


def _sources() -> str:
    """What the tests were run on: a hash over the package and its tests."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("ds_silent/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/w*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table_of(outcomes: list[Outcome]) -> Table:
    """One row for each environment."""
    table = Table(
        *("environment", "versions", "right", "wrong", "wrong without us too", "skipped", "seconds"),
        "what is not right, or why nothing ran",
    )
    for one in outcomes:
        counts = (str(one.passed), str(one.failed), str(one.not_ours), str(one.skipped), f"{one.seconds:.0f}")
        table.add_row(one.name, one.versions, *counts, one.said)
    return table


def page_of(outcomes: list[Outcome]) -> str:
    """docs/versions.md, of what has run."""
    ran = [one for one in outcomes if one.versions]
    parts = [part for one in ran for part in one.versions.split(", ")]
    usual = [part for part in dict.fromkeys(parts) if parts.count(part) > len(ran) / 2]
    lines = [
        "# Other versions",
        "",
        "Written by `python benchmarks/versions.py --page docs/versions.md` from trainings on CPU ranks with gloo.",
        "Each environment trains the covering cases of its frameworks with and without the block, against a float64",
        f"computation, and runs a file of tests. Where the table does not say otherwise: {', '.join(usual)}.",
        "",
        "A case is wrong without us if the framework is wrong or breaks without `ds_silent` too, or if two plain",
        "trainings differ. The command prints what is not right, such as [FSDP2 of torch 2.8.0 on",
        "gloo](real-bugs.md#fsdp2-of-torch-280-on-gloo).",
        "",
        "| environment | other versions | right | wrong | wrong without us | skipped | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in ran:
        versions = ", ".join(part for part in one.versions.split(", ") if part not in (*usual, one.name.lower()))
        counts = f"{one.passed} | {one.failed} | {one.not_ours} | {one.skipped}"
        lines.append(f"| {one.name} | {versions} | {counts} | {one.commit} |")
    return "\n".join(lines) + "\n"


def measured(environment: Environment, sources: str, again: bool) -> Outcome:
    """As it was measured last on the same sources, or now."""
    key = hashlib.sha256(f"{sources} {environment!r}".encode()).hexdigest()[:16]
    before = kept(environment)
    if before is not None and before.key == key and not again:
        return before
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    outcome = replace(run(environment), commit=described.stdout.strip(), key=key)
    if outcome.versions:  # what could not be made may be possible next time
        _kept_in(environment).write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def kept(environment: Environment) -> Outcome | None:
    """As it was measured last, on whatever sources."""
    path = _kept_in(environment)
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def _kept_in(environment: Environment) -> Path:
    return CACHE / f"outcome-{environment.name.replace(' ', '-')}.json"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Parts of the environments' names; all of them.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what has run on the same sources.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and end.")] = False,
    only_kept: Annotated[bool, typer.Option("--kept", help="What was measured last; measure nothing.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write the table as a page.")] = None,
) -> None:
    """The tests under other versions of Python, torch and the frameworks; see the file's first lines."""
    console = Console()
    chosen = [one for one in ENVIRONMENTS if not names or any(part in one.name for part in names)]
    if not chosen:
        console.print(f"no environment has {' or '.join(names or [])} in its name; --list shows them all")
        raise typer.Exit(2)
    if listed:
        console.print("\n".join(one.name for one in chosen))
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    if only_kept:
        outcomes = [outcome for outcome in map(kept, chosen) if outcome is not None]
    else:
        sources = _sources()
        outcomes = []
        for environment in chosen:
            console.print(f"{environment.name} ...")
            outcomes.append(measured(environment, sources, again))
    console.print(table_of(outcomes))
    if page is not None:
        page.write_text(page_of(outcomes))
    if any(one.failed or not one.passed for one in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
