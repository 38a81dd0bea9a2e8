"""What a configuration will measure, send, keep and change, in words, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ds_silent.capture.batch_rows import id_capacity
from ds_silent.config import DirectionConfig, SilentConsistencyConfig
from ds_silent.config.block_file import section, switched_on, zero_section
from ds_silent.config.destination import masked
from ds_silent.config.fields import about
from ds_silent.exchange.layout import LAYERS_TOGETHER, ExchangeShape, Layout, gathers_sketches, layout_of, place_size
from ds_silent.exchange.row_ids import Sampling, sampling_of
from ds_silent.exchange.rows import DECIDE
from ds_silent.maths.mixing import WORDS
from ds_silent.maths.sketch import make_plan
from ds_silent.text import size_text
from ds_silent.trace.form import TOGETHER, line_bytes

_MANY_LAYERS = 128


_OF_DS_CONFIG = (
    "by ds_silent.initialize, ds_silent.attach(engine), or deepspeed --module ds_silent train.py; DeepSpeed alone "
    "reads past the block without a word"
)
_OF_FILE = (
    "by ds_silent.observe(model, optimizer, config=FILE), or python -m ds_silent --silent-consistency-config FILE "
    'train.py; in a ds_config the block stands under "silent_consistency"'
)


def forecast_lines(
    config: SilentConsistencyConfig,
    ds_config: Mapping[str, Any],
    world_size: int,
    parameters: int | None = None,
    *,
    known: str = "",
    alone: bool = False,
) -> Iterator[str]:
    """What the observer will do under ``config``, a line each.

    Args:
        parameters: trainable ones, where they are known.
        known: from where the number of ranks is known, if nobody has given it.
        alone: the file holds the block and nothing of DeepSpeed's.
    """
    direction = config.direction
    steps = "every optimizer step" if config.interval == 1 else f"every {config.interval} optimizer steps"
    yield f"silent_consistency: on, measures {steps} over {world_size} ranks{known and f' ({known})'}"
    yield f"  read        {_OF_FILE if alone else _OF_DS_CONFIG}"
    if config.preflight:
        yield "  preflight   before step 1: weights, generators, sampler, hyper-parameters, configuration, versions"
    yield "  measures    loss and gradient norm of each rank, norm of the aggregated gradient, noise scale"
    yield f"  direction   {_direction(direction)}"
    yield f"  sends       {_collective(config, ds_config, world_size)}"
    if direction.method != "off":
        host, device = (size_text(_working_memory(direction.sketch_size, world_size, kind)) for kind in ("cpu", "meta"))
        yield f"  keeps       {host} per rank where gradients are on the CPU, {device} where on an accelerator"
        if direction.method == "exact" or direction.exact_interval:
            yield f"  exact       {_exact(config, ds_config, world_size, parameters)}"
        yield from _said_by_fields(direction)
    if config.reduction == "ordered":
        yield from _ordered_lines(config, ds_config, parameters)
    yield from _integrity_lines(config, ds_config, world_size)
    yield from _response_lines(config, ds_config, parameters)
    if config.coverage:
        sampling = _sampling(config, ds_config, world_size)
        travel = "row ids travel too, 12 B each"
        if sampling is not None and sampling.level:
            room = f"{4 * sampling.numbers} B from each rank"
            travel = f"ids of one row in {1 << sampling.level} travel too, in {room}, and both are estimates"
        yield f"  coverage    duplicates in a step, share of the epoch seen; {travel}"
    if config.detectors.enabled:
        rate = config.detectors.false_alarms_per_million_steps
        yield f"  judges      each measured step; false alarms by chance: at most {rate:g} in a million steps"
        if config.detectors.stop_on != "never":
            worst = "an error" if config.detectors.stop_on == "error" else "a warning or an error"
            yield f"  stops       all ranks with exit status 3, two measured steps after {worst}"
    board = ", TensorBoard files in tensorboard/" if config.tensorboard else ""
    files = f"metrics.jsonl, events.jsonl, scores.jsonl, matrices.jsonl{board}"
    yield f"  writes      {files} in {config.output_dir!a}, on rank 0"
    yield from _alert_lines(config)
    if config.trace is not None:
        each = size_text(line_bytes(config.trace.size, _MANY_LAYERS, TOGETHER))
        due = "" if config.trace.interval == 1 else f"{config.trace.interval}. "
        yield f"  trace       each {due}measured step is a line of trace.jsonl, of up to {each}"
    for block in (config, *(inner for _, inner in config if isinstance(inner, BaseModel) and inner is not direction)):
        yield from _said_by_fields(block)
    ends = " until it is stopped" if config.detectors.enabled and config.detectors.stop_on != "never" else ""
    if config.reduction == "ordered":
        yield "  changes     the reduction's last bits, at every step: fp32, and an order of its own"
    else:
        repairs = config.respond.on_aggregation_error == "retry" or config.resync.mode != "off"
        repairs |= config.respond.on_replica_drift in ("majority", "mean")
        until = " until there is something to repair" if repairs else ends
        yield f"  changes     nothing: the weights are bit for bit those of a training without it{until}"


def _said_by_fields(block: BaseModel) -> Iterator[str]:
    """Yield the lines that fields of a block bring along, where their keys are switched on."""
    for key, value in block:
        if value and "check" in about(type(block), key):
            title, text = about(type(block), key)["check"]
            yield f"  {title:<11} {text.format_map(dict(block))}"


def _alert_lines(config: SilentConsistencyConfig) -> Iterator[str]:
    """Who is told; their addresses are secrets."""
    for number, alert in enumerate(config.alerts):
        who = masked(alert.address).strip('"')
        worst = {"info": "every event", "warning": "warnings and errors", "error": "errors"}[alert.level]
        title = "" if number else "alerts"
        yield f"  {title:<11} {who}: {worst}, at most {alert.at_most_per_hour} in an hour, from rank 0"


def _integrity_lines(config: SilentConsistencyConfig, ds_config: Mapping[str, Any], world_size: int) -> Iterator[str]:
    size = config.direction.sketch_size
    if config.integrity.aggregation and config.direction.method == "off":
        yield "  reduction   not checked: that needs the sketches, which direction.method off does not make"
    elif config.integrity.aggregation:
        result = "sum" if str(ds_config.get("gradient_allreduce_op", "mean")).lower() == "sum" else "mean"
        what = f"aggregated gradient against the {result} of the ranks', applied against aggregated gradient"
        yield f"  reduction   {what}"
        if gathers_sketches(world_size):
            table = size_text(4 * make_plan(numel=1, size=size).width)
            sent = size_text(4 * 2 * place_size(size, world_size))
            yield f"  place       the layer where it went wrong; for each layer {table} are kept and {sent} sent"
    if config.integrity.replica_interval:
        steps = config.integrity.replica_interval
        parts = "not under ZeRO stage 3 or FSDP2"
        yield f"  replicas    bits compared every {steps} optimizer steps and after checkpoints; {parts}"


def _response_lines(
    config: SilentConsistencyConfig, ds_config: Mapping[str, Any], parameters: int | None
) -> Iterator[str]:
    """What is done about an error, and what that keeps and sends; see ``ds_silent.respond.responder``."""
    respond, resync = config.respond, config.resync
    halves = (name for name in ("bf16", "fp16") if switched_on(section(ds_config, name), "enabled"))
    dtype = next(halves, "fp32")
    size = _copy(parameters, 4 if dtype == "fp32" else 2) + (f" in {dtype}" if parameters is not None else "")
    waits = "each step waits for its own check"
    if respond.on_aggregation_error == "retry":
        times = f"up to {respond.retries} times"
        then = "goes on and says so" if respond.on_failed_retry == "report" else "ends with exit status 3"
        copy = f"keeps a copy of the local gradient ({size})"
        if config.reduction == "ordered":
            copy = "keeps no copy of its own"
        yield f"  retry       a wrong reduction is repeated {times} before it is used; then the training {then}"
        yield f"              {copy}; {waits}"
    elif respond.on_aggregation_error == "stop":
        yield f"  stops       before a wrong reduction is applied: suspect checkpoint, exit status 3; {waits}"
    steps = config.integrity.replica_interval
    if respond.on_replica_drift in ("majority", "mean"):
        majority = respond.on_replica_drift == "majority"
        bits = "the bits that more than half of the ranks hold" if majority else "the mean"
        yield f"  repairs     replicas compared after every {steps} updates; tensors that differ get {bits}"
        yield "              weights, fp32 masters and optimizer state; while nothing differs, checksums alone are sent"
    elif respond.on_replica_drift == "stop":
        yield f"  stops       when replicas differ after every {steps} updates: suspect checkpoint, exit status 3"
    state = "weights and optimizer state" if resync.state == "all" else "weights only"
    if resync.mode == "periodic":
        yield f"  resync      every {resync.interval} updates, what differs is averaged ({state})"
    elif resync.mode == "dynamic":
        yield f"  resync      at most every {resync.interval} updates, what differs is averaged beside the next step"
        yield f"              ({state}); keeps an fp32 copy of what differs meanwhile"


def _ordered_lines(
    config: SilentConsistencyConfig, ds_config: Mapping[str, Any], parameters: int | None
) -> Iterator[str]:
    """What the ordered reduction keeps and sends; see ``ds_silent.ordered.tree``."""
    steps = ds_config.get("gradient_accumulation_steps", 1)
    steps = steps if isinstance(steps, int) else 1
    pairing = config.ordered.micro_batches
    waiting = steps.bit_length() - 1 if pairing == "contiguous" else steps // 2
    until = " until the optimizer has run, beside their mean" * (config.respond.on_aggregation_error == "retry")
    yield f"  ordered     same bits however the step's micro-batches, {pairing}, are spread over ranks and accumulation"
    sums = f"up to {1 + waiting} fp32 gradients" if waiting else "one fp32 gradient"
    yield f"              keeps {sums} of {_copy(parameters)} where DeepSpeed accumulates one{until}"
    yield f"              exchanges pieces within {config.ordered.memory_mb} MiB, instead of DeepSpeed's reduction"


def _copy(parameters: int | None, width: int = 4) -> str:
    return f"{width} bytes per parameter" if parameters is None else size_text(width * parameters)


def _direction(direction: DirectionConfig) -> str:
    if direction.method != "sketch":
        return {"off": "off", "exact": "exact cosines at every measurement"}[direction.method]
    size = direction.sketch_size
    exact = f", checked exactly every {direction.exact_interval} measurements" if direction.exact_interval else ""
    return f"sketch of {size} numbers, standard error of one cosine about {size**-0.5:.2g}{exact}"


def _collective(config: SilentConsistencyConfig, ds_config: Mapping[str, Any], world_size: int) -> str:
    """The collectives of ``ds_silent.exchange.gather``, in bytes that one rank contributes.

    Row ids are counted where the batch sizes are known. How many layers the model has is not: what each of them adds
    is said beside it.
    """
    sampling = _sampling(config, ds_config, world_size)
    replicated = zero_section(ds_config)["stage"] == 0
    ids = 0 if sampling is None else sampling.numbers
    shapes = (ExchangeShape(world_size, layers, ids, 1, replicated, weights=TOGETHER) for layers in (0, 1))
    layout, one_more = (layout_of(config, shape) for shape in shapes)
    layer = 4 * (one_more.scalars - layout.scalars)
    late = f"per measurement, asynchronously; {layer} B more for each layer of the model"
    if layout.gathers:
        return f"one all-gather of {size_text(4 * sum(layout.parts))} from each rank {late}"
    layers = 2 * LAYERS_TOGETHER * one_more.layer_aggregates  # at most, of all together
    sums, own = size_text(4 * (sum(layout.sums) + layers)), 4 * (layout.scalars + layout.pairs)
    if not layout.block:
        return f"one all-reduce of {sums} and one all-gather of {own} B from each rank {late}"
    extremes = 2 * 4 * (len(DECIDE) + WORDS)
    return (
        f"two all-reduces of {sums} and {extremes} B, and one all-gather of {own} B from each rank in blocks of "
        f"{layout.block}, whose first ranks pass it on to rank 0 {late}"
    )


def _sampling(config: SilentConsistencyConfig, ds_config: Mapping[str, Any], world_size: int) -> Sampling | None:
    """Which row ids travel; None where none do, or the batch sizes are not known."""
    micro, steps = ds_config.get("train_micro_batch_size_per_gpu"), ds_config.get("gradient_accumulation_steps", 1)
    whole = ds_config.get("train_batch_size")
    if type(whole) is int:
        rows = max(1, whole // world_size)
    elif type(micro) is int and type(steps) is int:
        rows = micro * steps
    else:
        return None
    return sampling_of(world_size, id_capacity(config, rows)) if config.coverage else None


def _working_memory(sketch_size: int, world_size: int, device: str) -> int:
    """Bytes: tables and signs of T numbers, working memory in blocks, and the buffers of the exchange.

    Args:
        device: ``meta`` stands for any accelerator: the plan only asks whether it is the CPU.
    """
    plan = make_plan(numel=1, size=sketch_size, device=device)
    layout = Layout(size=sketch_size)
    blocks = plan.block_rows if device == "cpu" else 2 * plan.block_rows  # of sums, and of products with signs
    sketches = (2 + blocks) * plan.width  # local and aggregated table
    width = sum(layout.parts)
    buffers = width * (1 + world_size) if gathers_sketches(world_size) else 4 * sketch_size + width
    return 4 * (plan.width + sketches + buffers)


def _exact(
    config: SilentConsistencyConfig, ds_config: Mapping[str, Any], world_size: int, parameters: int | None
) -> str:
    """The extra memory and traffic of the exact method; see ``ds_silent.exchange.exact``."""
    if config.reduction == "ordered":
        return "from the pieces that the ordered reduction exchanges; nothing more is sent"
    zero = zero_section(ds_config)
    stage = zero["stage"]
    copies = stage in (2, 3) or (stage == 1 and bool(zero.get("overlap_comm")))
    sent = f"all-to-all in pieces within {config.direction.exact_memory_mb} MiB"
    if parameters is not None:
        # each rank keeps its own piece, so (N - 1)/N of the fp32 gradient leaves it
        sent += f", {size_text(4 * parameters * (world_size - 1) / world_size)} leave each rank"
    if not copies:
        return f"{sent}; no copy of the gradient"
    why = f"ZeRO stage {stage}" + (" with overlap_comm" if stage == 1 else "")
    return f"{sent}; and one fp32 copy of the gradient ({_copy(parameters)}), because {why} keeps none"
