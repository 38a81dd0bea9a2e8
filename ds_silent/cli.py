"""The command line.

    ds-silent check ds_config.json --world-size 8 --parameters 1155912192
    ds-silent drill --config ds_config.json
    ds-silent numerics --gradients gradients/
    ds-silent doctor --output-dir runs/my-run
    ds-silent watch runs/my-run
    ds-silent schema block
    ds-silent report runs/my-run
    ds-silent compare runs/a runs/b

A mistake is one sentence on standard error and exit status 2.
"""

from __future__ import annotations

import inspect
import re
import socket
from typing import Any

import typer

from ds_silent.text import mistake, one_line


def _option(about: str, metavar: str | None = None, *names: str, default: Any = None, **bounds: Any) -> Any:
    return typer.Option(default, *names, help=about, metavar=metavar, **bounds)


def _argument(about: str, metavar: str, default: Any = ...) -> Any:
    return typer.Argument(default, help=about, metavar=metavar)


_JSON_PATH = _option("Write everything to this file too.", "FILE", "--json")
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """See every worker of a data-parallel training.

    "check" reads a configuration, "drill" shows on this machine that the alarm works, "numerics" how much is rounding,
    "doctor" what this machine lacks, "schema" what may stand in the block and in the records, "report" what a run's
    records say, "compare" where two trainings part, "bisect" with which release they do; "watch" looks at a run while
    it trains, "alert" tries who is told of its events.
    """


@app.command()
def check(
    ds_config: list[str] = _argument(
        "DeepSpeed configurations, or files with the block alone: JSON, or DeepSpeed's base64 form.", "DS_CONFIG..."
    ),
    world_size: int | None = _option(
        "Data-parallel ranks to reckon with; default: what the batch sizes say, else 8.", "N", min=1, max=2**31 - 1
    ),
    parameters: int | None = _option("Trainable parameters of the model, for the exact method.", "N", min=1),
) -> None:
    """Say what a configuration will measure, send and keep; nothing is started.

    DeepSpeed's own part of it is checked too, by DeepSpeed's own classes.

    Exit status: 0 when every configuration can be honoured, else 2.
    """
    # Inside the command, because they import torch: `ds-silent --help` need not wait for that.
    from ds_silent.commands.forecast import forecast_lines
    from ds_silent.config import ConfigError, parse
    from ds_silent.config.block_file import load_ds_config, no_plain_json, under_its_name
    from ds_silent.distributed.places import read_groups
    from ds_silent.extras import installed, missing_sentence
    from ds_silent.frameworks.deepspeed.own_config import left_to_fill_in, ranks_known_from, refuse_broken
    from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config
    from ds_silent.observing.start import refuse_too_few_ranks, refuse_too_many_ranks, refuse_unusable_directory

    refused, of_deepspeed = 0, False
    for number, source in enumerate(ds_config):
        if len(ds_config) > 1:
            typer.echo(f"{chr(10) * (number > 0)}{source!a}")
        try:
            held = load_ds_config(source)
            loaded = under_its_name(held)
            config = parse(loaded)
            if config is not None:
                refuse_unsupported_config(loaded, config)
                read_groups(config.places)
            ranks = refuse_broken(loaded, world_size)
            if config is not None:
                refuse_too_few_ranks(config, ranks)
                refuse_too_many_ranks(config, ranks)
                refuse_unusable_directory(config)
        except ConfigError as error:
            refused, of_deepspeed = mistake(error), True
            continue
        alone = loaded is not held
        of_deepspeed |= not alone
        if config is None:
            typer.echo('silent_consistency: off (no block, or "enabled": false); the training runs as without it')
        else:
            known = "" if world_size else ranks_known_from(loaded)
            for line in forecast_lines(config, loaded, ranks, parameters, known=known, alone=alone):
                typer.echo(line)
            for note in [] if alone else left_to_fill_in(loaded):
                typer.echo(f"  {note}")
        if why := no_plain_json(source):
            typer.echo(f"  plain JSON  no: {why}; ds_silent and DeepSpeed read it, transformers' Trainer does not")
    if of_deepspeed and not installed("deepspeed"):
        note = missing_sentence("the check of DeepSpeed's own keys", ["deepspeed"], "deepspeed")
        typer.echo(f"ds-silent: {note}", err=True)
    raise typer.Exit(refused)


@app.command()
def drill(
    config: str | None = _option(
        "Your ds_config.json, or a file with the block alone; without it an empty block, fp32, ZeRO stage 0.", "FILE"
    ),
    framework: str = _option("Who trains: deepspeed, ddp, fsdp2 or megatron.", "FRAMEWORK", default="deepspeed"),
    fault: list[str] | None = _option("Only this fault; may be given several times. --list names them.", "NAME"),
    list_faults: bool = _option("Name the faults and end.", None, "--list", default=False),
    ranks: int = _option("Processes on this machine's CPU; at least 3, to outvote one.", "N", default=4, min=3, max=64),
    rank: int = _option("The rank that most faults strike.", "RANK", default=2, min=0),
    steps: int | None = _option("Longest training, in optimizer steps; 400 unless given.", "N", min=1),
    stage: int | None = _option(
        "ZeRO stage instead of the configuration's; with megatron 1 is its distributed optimizer.", "0-3", min=0, max=3
    ),
    dtype: str | None = _option("fp32 or bf16 instead of the configuration's.", "DTYPE"),
    json_path: str | None = _JSON_PATH,
) -> None:
    """Inject faults into short trainings on the CPU: is each found, with the right kind and ranks?

    A small model of its own is trained with your settings, healthy and then
    once per fault: some minutes for all faults, under a minute for a single one.
    Your own model and data are not touched.

    Exit status: 0 all found and the healthy runs silent, 1 not so, 2 a mistake in what was typed.
    """
    if framework == "deepspeed":
        from ds_silent.extras import MissingExtra, needs

        try:
            needs("ds-silent drill", "deepspeed")
        except MissingExtra as error:
            raise typer.Exit(mistake(error)) from None
    from ds_silent.drill.printing import drill_command
    from ds_silent.drill.run_drill import LONGEST, DrillOptions

    longest = LONGEST if steps is None else steps
    options = DrillOptions(config, tuple(fault or ()), ranks, rank, longest, stage, dtype, framework)
    raise typer.Exit(drill_command(options, list_faults, json_path))


@app.command()
def numerics(
    gradients: str | None = _option(
        "Your own gradients: one safetensors file per rank, same names and shapes, from before the "
        "reduction. Without it a small model of its own, on real rows.",
        "DIR",
    ),
    world_size: list[int] | None = _option(
        "Ranks to reduce over; may be given several times. Default: 2, 4 and 8.", "N", min=2, max=64
    ),
    dtype: list[str] | None = _option("fp32, bf16 or fp16; may be given several times. Default: all three.", "DTYPE"),
    steps: int = _option("Length of the trainings that show the weights; 0: none.", "N", default=20, min=0, max=1000),
    rounds: int = _option("Timed all-reduces of each dtype; 0: none.", "N", default=20, min=0, max=1000),
    processes: bool = _option("Start real processes, for gloo's own bits and for the time.", default=True),
    elements: int | None = _option("Size of the timed all-reduces; default: the gradient's.", "N", min=1),
    loss_scale: float | None = _option(
        "For fp16; default: where dynamic loss scaling settles. 1: none.", "SCALE", min=1.0
    ),
    seed: int = _option("Of the small model's weights, rows and dropout.", "N", default=1, min=0),
    json_path: str | None = _JSON_PATH,
) -> None:
    """Measure how far fp32, bf16 and fp16 reductions are from the float64 mean: what is rounding, what is a fault?

    Shows the error of one reduction beside the integrity check's bound, the bits
    that the order of the ranks decides, what that does to weights, and what fp32
    costs: the evidence for choosing communication_data_type.
    On the CPU; about a minute.

    Exit status: 0 rounding stays below the bound, 1 not so, 2 a mistake in what was typed.
    """
    from ds_silent.numerics.program import Options
    from ds_silent.numerics.report import numerics_command
    from ds_silent.numerics.rounding import DTYPES

    sizes, dtypes = tuple(world_size or ()), tuple(dict.fromkeys(dtype or DTYPES))
    options = Options(gradients, sizes, dtypes, steps, rounds, processes, elements, loss_scale, seed)
    raise typer.Exit(numerics_command(options, json_path))


@app.command()
def doctor(
    output_dir: str = _option("Where records are to be written; nothing is left there.", "DIR", default="runs/silent"),
    json_path: str | None = _JSON_PATH,
) -> None:
    """Look this machine over: what is missing or doubtful for a watched training?

    Accelerator and driver, CANN and torch_npu, versions, network interfaces,
    compiler, disk, shared memory, clock, environment. Run it on every node.

    Exit status: 0 all ok or a note, 1 something doubtful, 2 something missing or a mistake in what was typed.
    """
    from ds_silent.commands.doctor import doctor_command

    raise typer.Exit(doctor_command(output_dir, json_path))


@app.command()
def watch(
    run: str = _argument("Directory of a run, the output_dir of its block.", "RUN"),
    once: bool = _option(
        "Print what is known now as text, and end; so does an output to a file.", None, "--once", default=False
    ),
    as_json: bool = _option("Print it as JSON, and end.", None, "--json", default=False),
    stale: float | None = _option("Exit with 4 if no record was written for so many minutes.", "MINUTES", min=0.0),
    every: float = _option("Seconds between two looks at the files.", "SECONDS", default=1.0, min=0.1, max=3600.0),
    alert: list[str] | None = _option(
        "Tell this destination of warnings and errors that come from now on, as the block's alerts do; may be "
        "given several times. env:NAME keeps an address out of the list of processes.",
        "TO",
    ),
) -> None:
    """Look at a run while it trains, or afterwards: the verdict, the ranks, the events. Press ? for the keys.

    Only reads, and of growing files only what is new; the training does not notice.

    Exit status: 0 healthy, 1 warnings, 3 errors, 4 stale, 5 no records yet, 2 a mistake in what was typed.
    """
    from ds_silent.runs.watch_command import watch_command

    raise typer.Exit(watch_command(run, once, as_json, stale, every, alert or []))


@app.command()
def alert(
    test: list[str] = _option(
        "A destination as in the block's alerts, best as env:NAME; may be given several times.", "TO", default=...
    ),
    timeout: float = _option("Seconds that each may take.", "SECONDS", default=10.0, min=0.1, max=60.0),
) -> None:
    """Send a test message to the destinations of alerts: webhooks, mail, commands.

    Exit status: 0 all were sent, 1 some were not, 2 a mistake in what was typed.
    """
    raise typer.Exit(max(_sent_a_test(to, timeout) for to in test))


def _sent_a_test(to: str, seconds: float) -> int:
    from ds_silent.alerts.message import Alert
    from ds_silent.alerts.senders import NotSent, sender_of
    from ds_silent.alerts.sink import usable
    from ds_silent.config.destination import TRACKERS, WrongDestination

    try:
        destination = usable(to)
        if destination.form in TRACKERS or destination.form == "monitor":
            must = "be reached without a training, because it belongs to a training's run"
            remedy = "its alerts come with the first event; test a webhook, a mail or a command"
            raise WrongDestination(must, f'"{destination}"', remedy)
    except WrongDestination as error:
        return mistake(f"a destination {error}")
    text = "This is a test: alerts of ds_silent arrive here. No training is meant."
    hosts = (one_line(socket.gethostname()),)
    test = Alert("INFO: test of ds_silent's alerts", text, "info", "test", "no run", 0, (), hosts, "Nothing to do.")
    try:
        sender_of(destination, seconds)(test)
    except NotSent as error:
        mistake(f"nothing was sent to {destination}: {error}")
        return 1
    typer.echo(f"sent to {destination} ({destination.form})")
    return 0


@app.command()
def schema(
    name: str = _argument("block, metrics or events.", "NAME", default="block"),
) -> None:
    """Print the JSON Schema of the block, or of a line of the records.

    "block" lets an editor complete a ds_config; "metrics" and "events" describe
    a line of metrics.jsonl and of events.jsonl.

    Exit status: 0, or 2 for another name.
    """
    from ds_silent.commands.schema import NAMES, written

    if name not in NAMES:
        raise typer.Exit(mistake(f"there is no schema {name!a}; the names are {', '.join(NAMES)}"))
    typer.echo(written(name), nl=False)


@app.command()
def report(
    runs: list[str] = _argument("Directories of records (output_dir), or of several runs; side by side.", "RUN..."),
    output: str | None = _option("Where the page goes; else report.html beside the run.", "FILE", "--output", "-o"),
) -> None:
    """Write one HTML page of a run: who, where, since when - and what was not checked.

    The page needs no network and nothing beside it. A run that still goes on
    can be reported too.

    Exit status: 0 the page was written, whatever it says; 2 a mistake in what was typed, or nothing to read.
    """
    from ds_silent.runs.report.page import report_command

    raise typer.Exit(report_command(runs, output))


@app.command()
def compare(
    runs: list[str] = _argument(
        "A and B, and perhaps another run of A's training: directories (output_dir), or trace.jsonl files.", "A B [C]"
    ),
    golden: str | None = _option("A pinned baseline that takes the place of A; then only B is named.", "DIR"),
    tolerance: float | None = _option(
        "Relative difference that is allowed at the first step, where it is more than rounding's bound.",
        "X",
        min=0.0,
        max=0.99,
    ),
    names: str | None = _option(
        'Names of A and of B, as {"name in A": "name in B"}, of tensors or parts.', "FILE", "--map"
    ),
    json_path: str | None = _JSON_PATH,
    junit: str | None = _option("Write a JUnit file, one test case per link of the chain.", "FILE"),
    curves: bool = _option(
        "Compare the metrics of all steps instead, with intervals; no trace is needed.", None, "--curves", default=False
    ),
    only_answer: bool = _option(
        "Print the one sentence alone, for CI; the exit status is the same.", None, "--assert", default=False
    ),
    page: str | None = _option("Write a page: only what differs, and each link's curve with what is allowed.", "FILE"),
) -> None:
    """Say where two trainings part: the first step, layer and link of the chain, by which factor, and why.

    The links: rows, weights, loss, local gradient, reduced gradient, applied gradient, update, rates. Both runs need
    "trace" in their block. Numbers of ranks, buckets and threads may differ: what is rounding does not part them.

    Exit status: 0 they do not part, 1 they do, 2 a mistake in what was typed, or nothing to compare.
    """
    from ds_silent.commands.compare_runs import compare_command

    raise typer.Exit(compare_command(runs, golden, tolerance, names, json_path, junit, only_answer, curves, page))


@app.command()
def bisect(
    package: str = _argument("The package whose releases are tried.", "PACKAGE"),
    command: list[str] = _argument("The training, behind --.", "-- COMMAND..."),
    good: str = _option("The release whose training is right.", "VERSION", default=...),
    bad: str = _option("A newer one.", "VERSION", default=...),
    versions: str | None = _option(
        "Releases between them, separated by commas; default: all that pip knows.", "VERSIONS"
    ),
    directory: str = _option("Where releases and records are kept.", "DIR", default="runs/bisect"),
    tolerance: float | None = _option("As in compare.", "X", min=0.0, max=0.99),
    json_path: str | None = _JSON_PATH,
) -> None:
    """Train one script with the releases of a package: which is the first that parts, at which step and link?

    Each release is installed into a folder of its own, without what it depends on, and put before this environment's
    packages by PYTHONPATH. SILENT_CONSISTENCY_CONFIG names a block with "trace", so that a script under
    "torchrun -m ds_silent" needs no change; in other commands {output_dir} stands for the directory of the records.

    Exit status: 0 no release parts, 1 one does, 2 a mistake in what was typed, or a training that does not run.
    """
    from ds_silent.commands.bisect import bisect_command

    given = list(filter(None, (version.strip() for version in (versions or "").split(","))))
    raise typer.Exit(bisect_command(package, command, good, bad, given, directory, tolerance, json_path))


_entries: list[Any] = [app.registered_callback, *app.registered_commands]
for _entry in _entries:  # within a paragraph the terminal breaks the lines, at its own width
    _entry.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(_entry.callback.__doc__))
