"""Carry ``ds-silent numerics`` out, and say what was measured: a table and a plain sentence for each.

code = numerics_command(Options(), json_path=None)     # 0 sound, 1 not, 2 a mistake of the user
print_report(findings, Console())
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ds_silent.commands.measuring import carried_out
from ds_silent.numerics.program import Findings, Options, measure, to_json, weights_ranks
from ds_silent.numerics.rounding import Rounding
from ds_silent.numerics.weights import Distance
from ds_silent.numerics.wire import AGAIN, RealReduction, Timing


def numerics_command(options: Options, json_path: str | None) -> int:
    """Measure, print the report, write ``json_path``; return the exit status."""
    return carried_out(
        partial(measure, options), print_report, to_json, lambda findings: 0 if findings.sound else 1, json_path
    )


def print_report(findings: Findings, console: Console) -> None:
    """Every table that was measured, each with its sentence."""

    def show(title: str, table: Table, sentence: str) -> None:
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(table)
        say(sentence)

    def say(sentence: str) -> None:
        console.print(f"{sentence}\n", markup=False, highlight=False)

    options, rounding = findings.options, findings.rounding
    say(f"Gradients: {findings.source}; {findings.micro_batches} micro-batches, {findings.elements} elements.")
    show("Error of one reduction, relative to the mean gradient", _errors(rounding), error_sentence(rounding))
    title = "Share of the elements whose bits change, against the plain ring"
    show(title, _bits(rounding), bits_sentence(rounding))
    if rows := findings.reductions:
        title = "Real all-reduces (gloo): share of the elements that have the simulated order's bits"
        show(title, _real(rows), real_sentence(rows))
    if distances := findings.weights:
        title = (
            f"Distance between the weights after {options.steps} steps of the practice model over "
            f"{weights_ranks(options.world_sizes)} ranks, relative to the distance travelled"
        )
        show(title, _distances(distances), weights_sentence(distances, options.steps))
    if timings := findings.timings:
        title = f"One all-reduce of {timings[0].elements} elements between processes of this machine (gloo)"
        show(title, _costs(timings), cost_sentence(timings))


# -- the sentences -----------------------------------------------------------------------------------------------------


def error_sentence(rows: Sequence[Rounding]) -> str:
    """How far each dtype is from the float64 mean, and whether rounding could raise an alarm."""
    size = rows[-1].world_size
    last = [row for row in rows if row.world_size == size]
    said = ", ".join(f"{share(row.error)} in {row.dtype}" for row in last)
    said = f"Over {size} ranks one reduction is this far from the float64 mean: {said}."
    for row in last:
        if not math.isfinite(row.error):
            said += f" {row.dtype} overflowed: give a smaller --loss-scale than {row.loss_scale:g}."
        elif row.unscaled_error is not None and not row.unscaled_error < 1.5 * row.error:
            said += f" Without loss scaling fp16 would be {share(row.unscaled_error)} away."
    broken = [f"{row.dtype} over {row.world_size} ranks" for row in rows if not row.holds]
    if broken:
        return f"{said} ds_silent's bound does NOT hold for {', '.join(broken)}: rounding would raise an alarm there."
    if not (ratios := [row.ratio for row in rows if math.isfinite(row.ratio)]):
        return said
    return (
        f"{said} What ds_silent puts down to rounding is {min(ratios):.1f} to {max(ratios):.1f} times what it sees of "
        f"it, so rounding raises no alarm, and an aggregation-error event is something else."
    )


def bits_sentence(rows: Sequence[Rounding]) -> str:
    """Which differences in the last bits are no fault."""
    order = max((value for row in rows for value in row.changed.values()), default=0.0)
    sizes = [row.changed_by_world_size for row in rows if row.changed_by_world_size is not None]
    if order == 0.0:
        said = "Here no order changes a bit (two numbers have only one sum)"
    else:
        said = f"Another order of the same ranks changes the bits of up to {share(order)} of the elements"
    said += f", another world size of up to {share(max(sizes))}" if sizes else ""
    return (
        f"{said}. So two runs that differ in their last bits are rounding; two ranks of one run that do are a fault, "
        f"because one all-reduce gives all its ranks the same bits."
    )


def real_sentence(rows: Sequence[RealReduction]) -> str:
    """Which simulated order the library's is, and whether the ranks agree."""
    largest = [row for row in rows if row.world_size == rows[-1].world_size]
    common = [order for order in largest[0].equal if all(order in row.orders for row in rows)]
    if common:
        said = f"The real all-reduce is, bit for bit, the simulated one: {', '.join(common)}."
    else:
        worst = min(rows, key=lambda row: max(row.equal.values()))
        nearest = max(worst.equal, key=lambda order: worst.equal[order])
        said = (
            f"The real all-reduce adds in an order that is not simulated here: {worst.dtype} over {worst.world_size} "
            f"ranks has the bits of the nearest one ({nearest}) in {share(worst.equal[nearest])} of the elements."
        )
    apart = [f"{row.dtype} over {row.world_size}" for row in rows if not row.same_on_all_ranks]
    if apart:
        return f"{said} The ranks did NOT all get the same bits: {', '.join(apart)} ranks; that is a fault."
    return f"{said} All ranks got the same bits."


def weights_sentence(rows: Sequence[Distance], steps: int) -> str:
    """The narrowest dtype against the yardstick of other rows."""
    said = []
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        own = [row for row in rows if row.optimizer == optimizer]
        yardstick = own[-1]
        worst = max((row for row in own[:-1] if row.other == "fp64"), key=lambda row: row.relative, default=None)
        if worst is None or not worst.relative > 0.0:
            continue
        dtype = worst.one.partition(",")[0]
        said.append(
            f"{dtype} reductions have moved {optimizer}'s weights by {share(worst.relative)} of the way travelled "
            f"(other rows: {share(yardstick.relative)}, {yardstick.relative / worst.relative:.3g} times as far)"
        )
    return f"After {steps} steps {', and '.join(said) or 'no reduction moved the weights'}."


def cost_sentence(rows: Sequence[Timing]) -> str:
    """Bytes for certain, time as far as the noise of this machine lets it be seen."""
    own = [row for row in rows if row.world_size == rows[-1].world_size]
    noise = next(row for row in own if row.dtype == AGAIN)
    narrow = next((row for row in own if row.dtype not in ("fp32", AGAIN)), None)
    where = f"over {noise.world_size} processes on {os.cpu_count()} cores"
    if narrow is None:
        return f"fp32 {where} takes {1e3 * noise.seconds:.3g} ms; give --dtype bf16 too to compare."
    low, median, high = narrow.fp32_ratio
    said = (
        f"fp32 sends twice the bytes of {narrow.dtype}; {where} it took {median:.2f} times as long (quartiles "
        f"{low:.2f} to {high:.2f}; fp32 against itself {noise.fp32_ratio[0]:.2f} to {noise.fp32_ratio[2]:.2f})"
    )
    if low <= noise.fp32_ratio[2] and noise.fp32_ratio[0] <= high:
        said += ", a difference that the noise of this machine hides"
    return f"{said}. On a network whose bandwidth is the limit, count the bytes."


# -- the tables --------------------------------------------------------------------------------------------------------


def _errors(rows: Sequence[Rounding]) -> Table:
    table = _table("ranks", "dtype", "loss scale", "error", "seen by ds_silent", "its bound", "bound / seen")
    for row in rows:
        table.add_row(
            str(row.world_size),
            row.dtype,
            f"{row.loss_scale:g}" if row.dtype == "fp16" else "",
            *map(_number, (row.error, row.seen, row.bound)),
            f"{row.ratio:.2f}" if math.isfinite(row.ratio) else "",
        )
    return table


def _bits(rows: Sequence[Rounding]) -> Table:
    largest = max(row.world_size for row in rows)
    table = _table("ranks", "dtype", *rows[0].changed, f"{largest} ranks instead")
    for row in rows:
        other = row.changed_by_world_size
        last = "" if other is None else percent(other)
        table.add_row(str(row.world_size), row.dtype, *map(percent, row.changed.values()), last)
    return table


def _real(rows: Sequence[RealReduction]) -> Table:
    table = _table("ranks", "dtype", "all ranks alike", *rows[0].equal)
    for row in rows:
        alike = "yes" if row.same_on_all_ranks else "NO"
        table.add_row(str(row.world_size), row.dtype, alike, *map(percent, row.equal.values()))
    return table


def _distances(rows: Sequence[Distance]) -> Table:
    table = _table("optimizer", "reduction", "against", "distance")
    for row in rows:
        table.add_row(row.optimizer, row.one, row.other, _number(row.relative))
    return table


def _costs(rows: Sequence[Timing]) -> Table:
    table = _table("ranks", "dtype", "each rank sends", "median", "fp32's time / its own (quartiles)")
    for row in rows:
        low, median, high = row.fp32_ratio
        ratio = "1" if row.dtype == "fp32" else f"{median:.2f} ({low:.2f} .. {high:.2f})"
        sent = f"{row.bytes_sent / 2**20:.4g} MiB"
        table.add_row(str(row.world_size), row.dtype, sent, f"{1e3 * row.seconds:.3g} ms", ratio)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right")
    return table


def _number(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "overflow"


def percent(value: float) -> str:
    """A share for a table. Only what is exactly none or all is shown as 0 or 100 %."""
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return f"{min(max(100 * value, 0.01), 99.99):.2f} %"


def share(value: float) -> str:
    """A ratio for a sentence."""
    if not math.isfinite(value):
        return "infinitely far"
    return f"{100 * value:.2g} %" if value >= 1e-4 else f"{value:.1e}"
