"""The command line.

    ds-silent check ds_config.json --world-size 8 --parameters 1155912192
    ds-silent drill --config ds_config.json
    ds-silent numerics --gradients gradients/

A mistake is one sentence on standard error and exit status 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """See every worker of a data-parallel training.

    "check" reads a configuration, "drill" shows on this machine that the alarm works, "numerics" how much is rounding.
    """


@app.command()
def check(
    ds_config: Annotated[
        list[str],
        typer.Argument(help="DeepSpeed configurations: JSON files, or their base64 form.", metavar="DS_CONFIG..."),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks to reckon with.", metavar="N")] = 8,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Trainable parameters of the model, for the exact method.", metavar="N")
    ] = None,
) -> None:
    """Say what a configuration will measure, send and keep; nothing is started.

    Exit status: 0 when every configuration can be honoured, else 2.
    """
    # Inside the command, because they import torch and DeepSpeed: `ds-silent --help` need not wait for that.
    from ds_silent.capture.deepspeed import refuse_unsupported_config
    from ds_silent.config import ConfigError, parse
    from ds_silent.ds_config import load_ds_config

    refused = False
    for number, source in enumerate(ds_config):
        if len(ds_config) > 1:
            typer.echo(f"{chr(10) * (number > 0)}{source!a}")
        try:
            loaded = load_ds_config(source)
            config = parse(loaded)
            if config is not None:
                refuse_unsupported_config(loaded, config)
        except ConfigError as error:
            typer.echo(f"ds-silent: {error}", err=True)
            refused = True
            continue
        if config is None:
            typer.echo('silent_consistency: off (no block, or "enabled": false); the training runs as without it')
            continue
        for line in plan_lines(config, loaded, world_size, parameters):
            typer.echo(line)
    if refused:
        raise typer.Exit(2)


@app.command()
def drill(
    config: Annotated[
        str | None,
        typer.Option(help="Your ds_config.json; without it an empty block, fp32, ZeRO stage 0.", metavar="FILE"),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Only this fault; may be given several times. --list names them.", metavar="NAME"),
    ] = None,
    list_faults: Annotated[bool, typer.Option("--list", help="Name the faults and end.")] = False,
    ranks: Annotated[
        int,
        typer.Option(min=3, max=64, help="Processes on this machine's CPU; at least 3, to outvote one.", metavar="N"),
    ] = 4,
    rank: Annotated[int, typer.Option(min=0, help="The rank that most faults strike.", metavar="RANK")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Longest training, in optimizer steps; 400 unless given.", metavar="N"),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage instead of the configuration's.", metavar="0-3")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16 instead of the configuration's.", metavar="DTYPE")
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write everything to this file too.", metavar="FILE")
    ] = None,
) -> None:
    """Inject faults into short trainings on the CPU: is each found, with the right kind and ranks?

    A small model of its own is trained with your settings, healthy and then
    once per fault: some minutes for all faults, under a minute for a single one.
    Your own model and data are not touched.

    Exit status: 0 all found and the healthy runs silent, 1 not so, 2 a mistake in what was typed.
    """
    from ds_silent.drill.command import drill_command

    raise typer.Exit(drill_command(config, fault or [], list_faults, ranks, rank, steps, stage, dtype, json_path))


@app.command()
def numerics(
    gradients: Annotated[
        str | None,
        typer.Option(
            help="Your own gradients: one safetensors file per rank, same names and shapes, from before the "
            "reduction. Without it a small model of its own, on real rows.",
            metavar="DIR",
        ),
    ] = None,
    world_size: Annotated[
        list[int] | None,
        typer.Option(
            min=2, max=64, help="Ranks to reduce over; may be given several times. Default: 2, 4 and 8.", metavar="N"
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="fp32, bf16 or fp16; may be given several times. Default: all three.", metavar="DTYPE"),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=0, max=1000, help="Length of the trainings that show the weights; 0: none.", metavar="N"),
    ] = 20,
    rounds: Annotated[
        int, typer.Option(min=0, max=1000, help="Timed all-reduces of each dtype; 0: none.", metavar="N")
    ] = 20,
    processes: Annotated[bool, typer.Option(help="Start real processes, for gloo's own bits and for the time.")] = True,
    elements: Annotated[
        int | None,
        typer.Option(min=1, help="Size of the timed all-reduces; default: the gradient's.", metavar="N"),
    ] = None,
    loss_scale: Annotated[
        float | None,
        typer.Option(min=1.0, help="For fp16; default: where dynamic loss scaling settles. 1: none.", metavar="SCALE"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the small model's weights, rows and dropout.", metavar="N")] = 1,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write everything to this file too.", metavar="FILE")
    ] = None,
) -> None:
    """Measure how far fp32, bf16 and fp16 reductions are from the float64 mean: what is rounding, what is a fault?

    Shows the error of one reduction beside the integrity check's bound, the bits
    that the order of the ranks decides, what that does to weights, and what fp32
    costs: the evidence for choosing communication_data_type.
    On the CPU; about a minute.

    Exit status: 0 rounding stays below the bound, 1 not so, 2 a mistake in what was typed.
    """
    from ds_silent.numerics.command import numerics_command

    raise typer.Exit(
        numerics_command(
            gradients, world_size or [], dtype or [], steps, rounds, processes, elements, loss_scale, seed, json_path
        )
    )


def plan_lines(
    config: Any, ds_config: Mapping[str, Any], world_size: int, parameters: int | None = None
) -> Iterator[str]:
    """What the observer will do under ``config`` (a ``SilentConsistencyConfig``), a line for each thing.

    Args:
        config: the checked block.
        ds_config: the whole configuration, for the ZeRO stage.
        world_size: data-parallel ranks N.
        parameters: trainable parameters, where the size of the model is known.
    """
    direction = config.direction
    steps = "every optimizer step" if config.interval == 1 else f"every {config.interval} optimizer steps"
    yield f"silent_consistency: on, measures {steps} over {world_size} ranks"
    if config.preflight:
        yield "  preflight   before step 1: weights, generators, sampler, hyper-parameters, configuration, versions"
    yield "  measures    loss and gradient norm of each rank, norm of the aggregated gradient, noise scale"
    if direction.method == "off":
        yield "  direction   off"
        yield f"  sends       {_collective(0, world_size)} per measurement, asynchronously"
    else:
        yield f"  direction   {_direction(direction)}"
        yield f"  sends       {_collective(direction.sketch_size, world_size)} per measurement, asynchronously"
        host, device = (_size(_working_memory(direction.sketch_size, world_size, kind)) for kind in ("cpu", "meta"))
        yield f"  keeps       {host} per rank where gradients are on the CPU, {device} where on an accelerator"
        if direction.method == "exact" or direction.exact_interval:
            free = "from the pieces that the ordered reduction exchanges; nothing more is sent"
            found = free if config.reduction == "ordered" else _exact(config, ds_config, world_size, parameters)
            yield f"  exact       {found}"
        if direction.per_layer:
            yield "  per layer   one more sketch of each layer is sent; its size grows with the number of layers"
    if config.reduction == "ordered":
        yield from _ordered_lines(config, ds_config, parameters)
    yield from _integrity_lines(config, world_size)
    if config.coverage:
        yield "  coverage    duplicates in a step, share of the epoch seen; row ids travel too, 12 B each"
    if config.detectors.enabled:
        rate = config.detectors.false_alarms_per_million_steps
        yield f"  judges      each measured step; false alarms by chance: at most {rate:g} in a million steps"
        if config.detectors.stop_on != "never":
            worst = "an error" if config.detectors.stop_on == "error" else "a warning or an error"
            yield f"  stops       all ranks with exit status 3, two measured steps after {worst}"
    board = ", TensorBoard files in tensorboard/" if config.tensorboard else ""
    yield f"  writes      metrics.jsonl and events.jsonl{board} in {config.output_dir!a}, on rank 0"
    ends = " until it is stopped" if config.detectors.enabled and config.detectors.stop_on != "never" else ""
    if config.reduction == "ordered":
        yield "  changes     the reduction's last bits, at every step: fp32, and an order of its own"
    else:
        yield f"  changes     nothing: the weights are bit for bit those of a training without it{ends}"


def _integrity_lines(config: Any, world_size: int) -> Iterator[str]:
    """What the checks of the reduction and of the replicas do, keep and send."""
    from ds_silent.exchange import gathers_sketches
    from ds_silent.plan import place_size
    from ds_silent.sketch import make_plan

    size = config.direction.sketch_size
    if config.integrity.aggregation and config.direction.method == "off":
        yield "  reduction   not checked: that needs the sketches, which direction.method off does not make"
    elif config.integrity.aggregation:
        what = "aggregated gradient against the mean of the ranks', applied against aggregated gradient"
        yield f"  reduction   {what}"
        if gathers_sketches(world_size):
            table = _size(4 * make_plan(numel=1, size=size).width)
            sent = _size(4 * 2 * place_size(size, world_size))
            yield f"  place       the layer where it went wrong; for each layer {table} are kept and {sent} sent"
    if config.integrity.replica_interval:
        steps = config.integrity.replica_interval
        yield f"  replicas    bits compared every {steps} optimizer steps and after checkpoints; not under ZeRO stage 3"


def _ordered_lines(config: Any, ds_config: Mapping[str, Any], parameters: int | None) -> Iterator[str]:
    """What the ordered reduction keeps and sends; see ``ds_silent.ordered``."""
    steps = ds_config.get("gradient_accumulation_steps", 1)
    steps = steps if isinstance(steps, int) else 1
    pairing = config.ordered.micro_batches
    waiting = steps.bit_length() - 1 if pairing == "contiguous" else steps // 2
    size = "4 bytes per parameter" if parameters is None else _size(4 * parameters)
    until = " until the optimizer has run, beside their mean" * (config.respond.on_aggregation_error == "retry")
    yield f"  ordered     same bits however the step's micro-batches, {pairing}, are spread over ranks and accumulation"
    yield f"              keeps up to {1 + waiting} fp32 gradients of {size} where DeepSpeed accumulates one{until}"
    yield f"              exchanges pieces within {config.ordered.memory_mb} MiB, instead of DeepSpeed's reduction"


def _direction(direction: Any) -> str:
    size = direction.sketch_size
    sketch = f"sketch of {size} numbers, standard error of one cosine about {size**-0.5:.2g}"
    if direction.method == "exact":
        return "exact cosines at every measurement"
    return sketch + (
        f", checked exactly every {direction.exact_interval} measurements" * bool(direction.exact_interval)
    )


def _collective(sketch_size: int, world_size: int) -> str:
    """The collectives of ``ds_silent.exchange``, in bytes that one rank contributes."""
    from ds_silent.exchange import GATHER_LIMIT, Layout

    layout = Layout(size=sketch_size)
    if world_size <= GATHER_LIMIT or sketch_size == 0:
        return f"one all-gather of {_size(4 * (layout.vectors + layout.scalars))} from each rank"
    return f"one all-reduce of {_size(4 * 3 * sketch_size)} and one all-gather of {4 * layout.scalars} B from each rank"


def _working_memory(sketch_size: int, world_size: int, device: str) -> int:
    """Bytes: tables and signs of T numbers, a scratch of one block, and the buffers of the exchange.

    Args:
        device: ``meta`` stands for any accelerator: the plan only asks whether it is the CPU.
    """
    from ds_silent.exchange import GATHER_LIMIT, Layout
    from ds_silent.sketch import make_plan

    plan = make_plan(numel=1, size=sketch_size, device=device)
    layout = Layout(size=sketch_size)
    sketches = 2 * plan.width + plan.block_rows * plan.width  # local and aggregated table, scratch
    width = layout.vectors + layout.scalars
    buffers = width * (1 + world_size) if world_size <= GATHER_LIMIT else 4 * sketch_size + width
    return 4 * (plan.width + sketches + buffers)


def _exact(config: Any, ds_config: Mapping[str, Any], world_size: int, parameters: int | None) -> str:
    """The extra memory and traffic of the exact method; see ``ds_silent.exact``."""
    zero = ds_config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    copies = stage in (2, 3) or (stage == 1 and bool(zero.get("overlap_comm")))
    sent = f"all-to-all in pieces within {config.direction.exact_memory_mb} MiB"
    if parameters is not None:
        # each rank keeps its own piece, so (N - 1)/N of the fp32 gradient leaves it
        sent += f", {_size(4 * parameters * (world_size - 1) / world_size)} leave each rank"
    if not copies:
        return f"{sent}; no copy of the gradient"
    why = f"ZeRO stage {stage}" + (" with overlap_comm" if stage == 1 else "")
    size = "4 bytes per parameter" if parameters is None else _size(4 * parameters)
    return f"{sent}; and one fp32 copy of the gradient ({size}), because {why} keeps none"


def _size(number: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
