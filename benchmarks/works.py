"""What works where, measured: docs/works.md is written from these trainings, and from nothing else.

    python benchmarks/works.py        # make works: half an hour on 2 cores; without megatron-core no column of it
    python benchmarks/works.py --options DeepSpeed --json cases.json     # of one framework, and no page
    python benchmarks/works.py --again faults                            # with this part measured anew
    python benchmarks/works.py --again faults-DDP                        # with this piece of it

Three questions, each answered by running it:

* **Options**: the covering cases of each framework's oracle test, on 2 ranks, with the block and without it, each
  judged by itself: are weights, optimizer state and losses the same bits; are the numbers those of the float64 oracle;
  was the reduction checked within its bound, and nothing told that is not so?
* **Checks**: the drill on each framework: which of its faults are told?
* **Divided models and ways in**: the tests of the shapes and of the integrations.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]  # tests, and what they train

from ds_silent.extras import installed  # noqa: E402 - the tests are no package that is installed
from ds_silent.practice.ranks import RankBroke  # noqa: E402
from tests.frameworks import test_oracle as oracle  # noqa: E402
from tests.support.distributed import run_distributed  # noqa: E402

PAGE = ROOT / "docs" / "works.md"
CACHE = ROOT / "build" / "works"
ORACLES = {
    "DeepSpeed": ("tests.frameworks.test_oracle", "tests.support.training", "train"),
    "DDP": ("tests.frameworks.test_ddp", "tests.support.ddp_training", "train_ddp"),
    "FSDP2": ("tests.frameworks.test_fsdp2", "tests.support.ddp_training", "train_ddp"),
    "Megatron-core": ("tests.frameworks.test_megatron", "tests.support.megatron_training", "train_megatron"),
}
"""Framework -> where its covering cases are, and what trains one."""
PACKAGES = {"Megatron-core": "megatron.core"}
DRILLS = {"DeepSpeed": "deepspeed", "DDP": "ddp", "FSDP2": "fsdp2", "Megatron-core": "megatron"}
TESTS = {
    "DeepSpeed": ["tests/frameworks/test_deepspeed_shapes.py"],
    "Megatron-core": ["tests/frameworks/test_megatron_parallel.py", "tests/frameworks/test_megatron_groups.py"],
    "Hugging Face, TRL, Lightning": ["tests/integrations"],
    "Examples under their launchers": ["tests/launch/test_examples.py"],
}
RANKS = 2
AGAIN = 3  # plain trainings, where bits differ: a race does not show in each
YES, NO = "yes", "**no**"
NOTHING_TOLD = "nothing reported"
NOT_APPLICABLE = "not applicable"
STEPS = ((1, 6), (7, 21), (22, 70), (71, 400))
BANDS = ("silent", "before step 1", *(f"steps {a} to {b}" for a, b in STEPS), "below rounding")


class Answers(TypedDict):
    """Of one case; as JSON for what reads it."""

    bits: bool  # the same with the block and without it
    numbers: bool  # those of the oracle
    sums: bool  # the reduction is within its bound, and nothing is told of it
    ours: bool  # False: what is a no is one without the block too
    said: str  # of a no


# -- options -----------------------------------------------------------------------------------------------------------


def described(case: Any) -> str:
    """What of a case is not the default."""
    told = []
    for field in fields(case):
        value = getattr(case, field.name)
        if value == field.default or (not value and field.default in (None, False, 0)) or value == {}:
            continue
        name = field.name.replace("_", " ")
        told.append(name if value is True else f"{name} {_plain(value)}")
    return ", ".join(told) or "as it comes"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    return str(value)


def held(check: Callable[[], None]) -> bool:
    """Whether what a test asserts is so."""
    try:
        check()
    except (AssertionError, ValueError):
        return False
    return True


def judged(case: Any, of_ranks: list[Any]) -> Answers:
    """One case, of which every rank has the observed training and the plain one."""
    trace = of_ranks[0][0]

    def bits() -> None:
        for observed, plain in of_ranks:
            assert (observed.weights, observed.optimizer) == (plain.weights, plain.optimizer), "other bits"
            assert observed.losses == plain.losses, "other losses"

    def numbers() -> None:
        assert trace.records, "no record"
        for record in trace.records:
            oracle.check_record(case, record, trace.oracle[record["step"] - 1])
        if case.per_layer:
            oracle.check_layers(case, trace)

    def sums() -> None:
        for record in trace.records:
            oracle.check_integrity(case, record, len(of_ranks))
        oracle.check_events(case, trace)

    same, right, checked = (held(check) for check in (bits, numbers, sums))
    told = [event["message"] for event in trace.events if event["kind"] in oracle.RESULTS]
    said = "" if same and right and checked else f"reported: {told[0][:160]}" if told else NOTHING_TOLD
    return Answers(bits=same, numbers=right, sums=checked, ours=True, said=said)


def trained(train: Callable[..., Any], case: Any, observed: bool = True) -> list[Any]:
    """On each rank: with the block, and without it."""
    with tempfile.TemporaryDirectory(prefix="works_") as directory:
        arguments = ((case,), directory, train, observed)
        return [rank[0] for rank in run_distributed(oracle.run_cases, RANKS, arguments, timeout=300)]


def differ(results: list[Any], again: list[Any]) -> bool:
    """Whether two plain trainings have other bits."""
    return any(one.weights != other.weights for (_, one), (_, other) in zip(results, again, strict=True))


def answered(train: Callable[..., Any], case: Any) -> Answers:
    """One case; is what is wrong also wrong without the block?"""
    try:
        results = trained(train, case)
    except RankBroke as error:
        said = ([line for line in str(error).splitlines() if line.strip()] or [str(error)])[-1][:160]
        broke = Answers(bits=False, numbers=False, sums=False, ours=True, said=f"broke: {said}")
        try:
            trained(train, case, observed=False)
        except RankBroke:
            broke["ours"] = False
        return broke
    found = judged(case, results)
    if not found["bits"]:
        if any(differ(results, trained(train, case, observed=False)) for _ in range(AGAIN)):
            found["ours"], found["said"] = False, "two plain trainings have other bits"
    elif not found["numbers"] and not all(math.isfinite(truth["loss"]["mean"]) for truth in results[0][0].oracle):
        found["ours"], found["said"] = False, "the framework gathers weights for the oracle that are not finite"
    elif not found["numbers"] and not found["sums"] and found["said"] != NOTHING_TOLD:
        found["ours"] = False  # the oracle and the check say the same of a training that has the plain one's bits
    return found


def all_right(answers: Answers) -> bool:
    """Whether no question is answered with no."""
    return answers["bits"] and answers["numbers"] and answers["sums"]


def shown(answers: Answers) -> str:
    """The three answers in words."""
    return " ".join(YES if one else NO for one in (answers["bits"], answers["numbers"], answers["sums"]))


def options(name: str) -> dict[str, Answers]:
    """Of one framework: what a covering case sets -> its answers."""
    covering, training, function = ORACLES[name]
    train = getattr(import_module(training), function)
    found: dict[str, Answers] = {}
    for case in import_module(covering).COVERING:
        found[described(case)] = answers = answered(train, case)
        whose = "" if answers["ours"] else "without the block too: "
        print(f"{name}: {described(case)}: {shown(answers)} {whose}{answers['said']}", flush=True)
    return found


def options_list(found: dict[str, dict[str, Answers]]) -> Iterable[str]:
    """One line for each framework with the number of its cases that are right; then its cases with a no."""
    for name, cases in found.items():
        yield f"* {name}: {sum(map(all_right, cases.values()))} of {len(cases)} cases right"
        yield from (f"* {name}, {case}: {shown(one)}" for case, one in cases.items() if not all_right(one))


# -- checks ------------------------------------------------------------------------------------------------------------


def drilled(framework: str) -> dict[str, str]:
    """Fault -> how it is told, in one word or two."""
    with tempfile.TemporaryDirectory(prefix="works_") as directory:
        out = Path(directory, "drill.json")
        ds_silent = [sys.executable, "-c", "from ds_silent.cli import app; app()"]
        command = [*ds_silent, "drill", "--framework", framework, "--json", str(out)]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        drill = json.loads(out.read_text())
    told = dict.fromkeys(drill.get("not_applicable", {}), NOT_APPLICABLE)
    for training in drill["trainings"]:
        verdict = training["verdict"]
        if not training["fault"]:
            told[training["name"]] = "silent" if training["right"] else NO
        elif training["right"]:
            told[training["name"]] = f"step {verdict['step']}" if verdict["step"] is not None else "below rounding"
        else:
            told[training["name"]] = NO
    return told


def checks_table(found: dict[str, dict[str, str]]) -> Iterable[str]:
    """One row for each band of steps, with the number of each framework's faults; then those that are not told."""
    yield f"| reported | {' | '.join(found)} |"
    yield "|---|" + "---|" * len(found)
    for band in BANDS:
        counts = [str(sum(band_of(said) == band for said in cells.values())) for cells in found.values()]
        yield f"| {band} | {' | '.join(counts)} |"
    left = [f"* {name}, {fault}: {NO}" for name, cells in found.items() for fault, said in cells.items() if said == NO]
    yield from ("", *left) if left else ()


def band_of(said: str) -> str:
    """The row of the table for how a fault is told."""
    if not said.startswith("step "):
        return said
    step = int(said.removeprefix("step "))
    return "before step 1" if step == 0 else next(f"steps {a} to {b}" for a, b in STEPS if step <= b)


# -- tests -------------------------------------------------------------------------------------------------------------


def tested(paths: list[str]) -> dict[str, str]:
    """Test -> its outcome."""
    with tempfile.TemporaryDirectory(prefix="works_") as directory:
        out = Path(directory, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(out), *paths]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        cases = ET.parse(out).getroot().iter("testcase")  # written by the pytest that was started here
        return {str(case.get("name")).removeprefix("test_").replace("_", " "): _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    skipped = case.find("skipped")
    if skipped is not None:
        return f"not run: {skipped.get('message')}"
    return YES if case.find("failure") is None and case.find("error") is None else NO


def tests_table(found: dict[str, dict[str, str]]) -> Iterable[str]:
    """One row for the tests of each framework or launcher; then those that fail, and why others were not run."""
    yield "| tests | passed |"
    yield "|---|---|"
    for name, outcomes in found.items():
        files = ", ".join(f"`{path}`" for path in TESTS[name])
        yield f"| {name}: {files} | {sum(one == YES for one in outcomes.values())} of {len(outcomes)} |"
    left = [f"* {name}, {test}: {it}" for name, one in found.items() for test, it in one.items() if it != YES]
    yield from ("", *left) if left else ()


# -- the page ----------------------------------------------------------------------------------------------------------


def page(
    options: dict[str, dict[str, Answers]], faults: dict[str, dict[str, str]], tests: dict[str, dict[str, str]]
) -> str:
    """The whole of docs/works.md; a part that is empty is left out."""
    names = [name for name in ("torch", "deepspeed", "megatron-core", "transformers", "accelerate") if _has(name)]
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in names)
    lines = [
        "# What works where",
        "",
        f"Written by `make works` from trainings on CPU ranks with gloo: {versions}.",
        "",
    ]
    if options:
        lines += [
            "## Options",
            "",
            "[Options](limits.md#supported) and values of the block on 2 ranks. A case is right if weights,",
            "optimizer state and losses have the same bits as without the block, numbers are those of a float64",
            "computation, and no event is false.",
            "",
            *options_list(options),
            "",
        ]
    if faults:
        lines += [
            "## Faults",
            "",
            "When the [drill](drill.md) reports its faults. They begin before step 1, at step 21, or, in the",
            "reduction and the replicas, at step 4. Silent are the healthy trainings.",
            "",
            *checks_table(faults),
            "",
        ]
    if tests:
        lines += ["## Divided models and ways in", "", *tests_table(tests), ""]
    return "\n".join(lines)


def _has(name: str) -> bool:
    return installed(name.replace("megatron-core", "megatron.core"))


def measured(part: str, name: str, measure: Callable[[], Any]) -> Any:
    """A piece of a part of the page: as it was measured last, or now."""
    kept = CACHE / f"{part}-{name}.json"
    if not kept.exists():
        print(f"{part} of {name} ...", flush=True)
        found = measure()
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found, indent=1))
    return json.loads(kept.read_text())


PARTS: dict[str, dict[str, Callable[[], Any]]] = {
    "options": {name: partial(options, name) for name in ORACLES if installed(PACKAGES.get(name, "torch"))},
    "faults": {name: partial(drilled, DRILLS[name]) for name in DRILLS if installed(PACKAGES.get(name, "torch"))},
    "tests": {name: partial(tested, paths) for name, paths in TESTS.items()},
}
PIECES = tuple(f"{part}-{name}" for part, pieces in PARTS.items() for name in pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", choices=ORACLES, help="only the options of this framework, and no page")
    parser.add_argument("--json", type=Path, help="with --options: write the answers here")
    parser.add_argument("--again", nargs="*", choices=(*PARTS, *PIECES), default=[], help="to be measured anew")
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[], help="parts to leave out of the page")
    arguments = parser.parse_args()
    if arguments.options:
        found = options(arguments.options)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
        sys.exit(0 if all(all_right(answers) or not answers["ours"] for answers in found.values()) else 1)
    for piece in PIECES:
        if piece in arguments.again or piece.split("-")[0] in arguments.again:
            (CACHE / f"{piece}.json").unlink(missing_ok=True)
    by_part = {
        part: {name: measured(part, name, how) for name, how in pieces.items() if part not in arguments.without}
        for part, pieces in PARTS.items()
    }
    PAGE.write_text(page(**by_part))
    wrong = sum(NO in line for line in PAGE.read_text().splitlines())
    print(f"{PAGE.relative_to(ROOT)} is written; {wrong} rows have a no" if wrong else f"{PAGE.name}: no row has a no")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
