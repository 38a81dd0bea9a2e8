"""Report a reduction or an optimizer's input that is not what it must be. Facts and bounds, no baselines.

Thresholds are the rounding bounds of ``ds_silent.maths.rounding_bound``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.lifecycle import APPLIED
from ds_silent.distributed.parts import SHOWN_RANKS, Parts, listed, outvoted, parts_of
from ds_silent.maths.causes import Cause, MicroBatches
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import AppliedCheck, Evidence, ReductionEvidence
from ds_silent.records import Event, EventKind, Score, StepRecord
from ds_silent.text import TORCH, Words, named

SHOWN_LAYERS = 3
MANY_RANKS = 64  # above, each cause is a long sentence already: one of other layers is told
SCALED_UNLIKE = (
    "Clip by the norm of the whole gradient, on every rank; look for code that scales or clips on some ranks only. "
    "Do not trust the weights of this run since then; go back to the last checkpoint before it."
)
_REPEATED = (
    "It was not applied: the reduction was repeated. If this comes again, look at the network and the memory of the "
    "rank named."
)


class ReductionErrors(Detector):
    """Report what is wrong with a step's aggregate, and with what an optimizer applied."""

    def __init__(self, words: Words = TORCH):
        self._words = words

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.scores = bounds(evidence.reduction)
        self.notes = tuple(notes(evidence.reduction, self._words))
        return reduction(record, evidence.reduction, self._words)


def reduction(record: StepRecord, seen: ReductionEvidence | None, words: Words = TORCH) -> list[Finding]:
    """Find what is wrong with this step's aggregate, and with what an optimizer applied."""
    if seen is None:
        return []
    findings, layers = [], seen.layers
    if seen.check is not None and (seen.check.wrong or (seen.repeated is not None and not seen.received)):
        findings.append(_aggregation(record, seen, seen.check, words))
        if seen.repeated:
            findings[-1] = replace(findings[-1], remedy=_REPEATED)
        if seen.micro_batches is not None:
            findings.append(_micro_batches(record, seen.check, seen.micro_batches, layers, words))
    elif seen.handed is not None:
        findings.append(_handed(record.step, seen.handed))
    elif seen.received:
        findings.append(_received(record, seen, seen.received, words))
    if seen.applied is not None:
        findings += _applied(record, seen.applied, words)
    return findings


def bounds(seen: ReductionEvidence | None) -> tuple[Score, ...]:
    """Return the errors of this step beside what rounding explains of them, where they could be measured."""
    check, applied = (None, None) if seen is None else (seen.check, seen.applied)
    scores = []
    if check is not None and check.relative_error is not None and check.rounding_bound is not None:
        scores.append(Score("rounding", check.relative_error, check.rounding_bound, where="aggregated gradient"))
    if applied is not None and not applied.changed:
        scores.append(Score("rounding", applied.relative_error, applied.bound, where=APPLIED))
        factors = applied.known
        if factors and applied.expected > 0.0 and not applied.unscaled_late:
            off = max(abs(factor / applied.expected - 1.0) for factor in (max(factors), min(factors)))
            scores.append(Score("rounding", off, applied.tolerance, where="factor of the applied gradient"))
    return tuple(scores)


def notes(seen: ReductionEvidence | None, words: Words = TORCH) -> list[Event]:
    """Note once that the script changes gradients, so that what is applied cannot be compared with the aggregate."""
    applied = None if seen is None else seen.applied
    if applied is None or not applied.note:
        return []
    factors = [factor / applied.expected for factor in applied.known]
    shown = list(dict.fromkeys(f"{factor:.3g}" for factor in (min(factors), max(factors)))) if factors else []
    size = f"{' to '.join(shown)} times" if shown else "another gradient than"
    message = (
        f"The script changes gradients between the reduction and the step (step {applied.step}: {size} the aggregated "
        "gradient is applied): the reduction is still checked, what the optimizer applies is not."
    )
    remedy = (
        f"Nothing to do if that is meant. What is written through {words.hidden_writes} cannot be followed; "
        "in-place operations on parameter.grad can."
    )
    return [Event(applied.step, "gradient-changed", "info", (), APPLIED, None, None, message, remedy)]


def _aggregation(record: StepRecord, seen: ReductionEvidence, check: AggregateCheck, words: Words) -> Finding:
    cause, layers, received = seen.cause, seen.layers, seen.received
    error, bound = check.relative_error, check.rounding_bound
    finite = error is not None and bound is not None and math.isfinite(error)
    size = f"{error:.3g} of it" if finite else "no finite multiple of it"
    allowed = "" if bound is None else f", rounding explains at most {bound:.2g}"
    message = f"The aggregated gradient is not the {seen.result} of the ranks' gradients: the error is {size}{allowed}."
    kind: EventKind = "aggregation-error"
    where, what = "aggregated gradient", "unexplained"
    ranks: tuple[int, ...] = ()
    groups = next(iter(received.values())) if received else ()
    apart = len(groups) == record.world_size > 1
    own = cause is not None and apart and all(map(_is_own, (cause, *cause.elsewhere)))
    if cause is not None and own:
        kind, where, what = "unreduced-gradient", layers_text(cause.wrong, layers), "unreduced"
        end = "nothing was reduced" if len(cause.wrong) == len(layers) else "they were not reduced there"
        message += f" Every rank holds another one in {where}, as far as it was checked its own: {end}."
    elif cause is not None:
        where, what = layers_text(cause.wrong, layers), cause.kind
        ranks = () if what == "leftover" and len(cause.ranks) == record.world_size else cause.blamed
        parts = (cause, *cause.elsewhere[: 2 if record.world_size <= MANY_RANKS else 1])
        message += "".join(f" {cause_sentence(part, layers, record.world_size, seen.result)}" for part in parts)
        if cause.unexplained:
            message += f" No single rule explains {layers_text(cause.unexplained, layers)}."
        if cause.kind == "unreduced":
            kind = "unreduced-gradient"
    if received and not own:
        message += f" {who_received(groups, record.world_size)}"
        odd = outvoted(groups)
        if apart and (what == "unreduced" or (record.world_size > 2 and what != "leftover")):
            kind, what, ranks = "unreduced-gradient", "unreduced", ()
            message += " Every rank holds another one, as when nothing was reduced there."
        ranks = ranks or odd
    # what no single rule explains is another guess at each step, and yet the same fault
    guessed = cause is None or (bool(cause.unexplained) and not own) or what in ("partial", "noise")
    key = "integrity unexplained" if guessed else f"integrity {what} {where}"
    found = Finding(key, kind, "error", ranks, where, error, bound, message, distrust(words, ranks, what), record.step)
    effects = ("replica-drift",) if received else ()  # the ranks go on from different gradients
    return replace(found, effects=effects, family="reduction", log_excess=check.log_excess)


def _is_own(cause: Cause) -> bool:
    """Tell whether what was checked is one rank's own gradient."""
    return cause.kind == "unreduced" and cause.factor is not None and abs(cause.factor - 1.0) < 0.005


def _micro_batches(
    record: StepRecord, check: AggregateCheck, found: MicroBatches, layers: tuple[str, ...], words: Words
) -> Finding:
    """Name the micro-batches that did not enter once, by their own sketches, of an error that goes on."""
    count, everybody = len(found.weights[0]), record.world_size
    groups: dict[tuple[tuple[int, ...], float], list[int]] = {}  # ranks and weight -> micro-batches
    for micro_batch, off in found.off.items():
        for weight in sorted({rounded_weight(weight) for weight in off.values()}):
            alike = tuple(rank for rank in off if rounded_weight(off[rank]) == weight)
            groups.setdefault((alike, weight), []).append(micro_batch + 1)
    told = []
    for (ranks, weight), numbers in groups.items():
        entered = "did not enter" if weight == 0.0 else f"entered {weight:.1f} times"
        told.append(f"number{'s' * (len(numbers) > 1)} {numbers_text(numbers)} of {named(ranks, everybody)} {entered}")
    blamed = {rank for ranks, _ in groups for rank in ranks}
    where = layers_text(found.layers, layers)
    shown = "; ".join(told[:4]) + ("; …" if len(told) > 4 else "")
    message = f"Of the {count} micro-batches of step {found.step}, by their own sketches, in {where}: {shown}."
    guilty = () if len(blamed) == everybody else tuple(sorted(blamed))
    key, remedy = f"integrity micro-batches {where}", distrust(words, guilty)
    error, bound = check.relative_error, check.rounding_bound
    return Finding(key, "aggregation-error", "error", guilty, where, error, bound, message, remedy, found.step)


def _received(record: StepRecord, seen: ReductionEvidence, received: dict[int, Parts], words: Words) -> Finding:
    """Report ranks that hold different bits although the checked slices add up to the mean or sum."""
    groups, where = next(iter(received.values())), layers_text(tuple(received), seen.layers)
    if seen.unsynchronised or seen.more_came:
        which = "No backward of this step was"
        if seen.more_came:
            which = "Of the backwards of this step those behind the reduced one were not"
        message = (
            f"{which} reduced in {where}, and the optimizer stepped: every rank applies the "
            "gradient of its own rows, and the replicas part."
        )
        remedy = distrust(words, (), "unsynchronised")
        key = f"integrity unsynchronised {where}"
        found = Finding(key, "unreduced-gradient", "error", (), where, None, None, message, remedy, record.step)
        return replace(found, effects=("replica-drift",))
    odd = outvoted(groups)
    message = (
        f"The ranks hold different aggregated gradients in {where}: {who_received(groups, record.world_size)} Where it "
        "was checked the reduction is right, up to rounding."
    )
    if seen.changed:
        message += " The script has changed the gradient since the reduction, so the difference may be its own."
    remedy = distrust(words, odd, "changed")
    key = f"integrity received {odd}"  # in other layers at each step, where the script clips each by its own norm
    found = Finding(key, "aggregation-error", "error", odd, where, None, None, message, remedy, record.step)
    return replace(found, effects=("replica-drift",))


def _handed(step: int, factors: tuple[float, ...]) -> Finding:
    """Report a script that has scaled the aggregate by other factors on other ranks."""
    shown = [f"{factor:.3g}" for factor in factors]
    groups = parts_of(shown)
    odd = outvoted(groups)
    those = "; ".join(f"{named(group, len(factors))} applied {shown[group[0]]} times" for group in groups[:4])
    message = f"Between the reduction and the step the ranks scaled the gradient differently: {those} the aggregate."
    key, remedy = "integrity handed", SCALED_UNLIKE
    found = Finding(key, "aggregation-error", "error", odd, APPLIED, None, None, message, remedy, step, step)
    return replace(found, effects=("replica-drift",))


def _applied(record: StepRecord, seen: AppliedCheck, words: Words) -> list[Finding]:
    world_size, findings = record.world_size, list[Finding]()

    def add(key: str, ranks: tuple[int, ...], score: float | None, bound: float | None, text: str, remedy: str) -> None:
        key, message, step = f"integrity {key}", f"{text} (step {seen.step})", seen.step
        found = Finding(key, "aggregation-error", "error", ranks, APPLIED, score, bound, message, remedy, step, step)
        apart = ("replica-drift",) if ranks and len(ranks) < world_size else ()
        findings.append(replace(found, effects=apart))

    if seen.idle:
        others = "and nothing says why" if len(seen.idle) == world_size else "although others' did"
        text = f"The optimizer of {named(seen.idle, world_size)} did not step, {others}."
        remedy = (
            "Look for code that skips optimizer.step() on some ranks, or clears the gradients before it, or for a loss "
            "scale that differs."
        )
        add(f"idle {seen.idle}", seen.idle, None, None, text, remedy)
        groups = parts_of(rank in seen.idle for rank in range(world_size))
        counts = f"unlike:counters:{outvoted(groups)}"  # a step that was skipped is not counted
        findings[-1] = replace(findings[-1], effects=(*findings[-1].effects, counts, f"replicas {groups}"))
    if seen.changed:
        if seen.unlike:
            usual = statistics.median_low(seen.known)  # of an empty share, which goes with the others
            applied = tuple(usual if factor is None else factor for factor in seen.factors)
            findings.append(_handed(seen.step, applied))
        return findings
    wrong = seen.wrong_factor
    if seen.unscaled_late:
        assert seen.rescaled is not None
        ratio = seen.rescaled / seen.expected
        text = (
            f"{words.framework} unscaled this step with the next step's loss scale: {ratio:.4g} times the gradient "
            "was applied."
        )
        remedy = "Nothing to do: one step is too small each time the loss scale grows; bf16 needs no loss scale."
        add("rescaled", (), abs(ratio - 1.0), seen.tolerance, text, remedy)
        findings[-1] = replace(findings[-1], severity="info")
    elif wrong:
        factors = [factor for rank in wrong if (factor := seen.factors[rank]) is not None]
        ratio = sum(factors) / len(factors) / seen.expected
        everywhere = len(wrong) == len(seen.known)
        whose = "" if everywhere else f" on {named(wrong, world_size)}"
        text = f"The optimizer applied {ratio:.4g} times the aggregated gradient, unscaled and clipped{whose}."
        remedy = (
            f"Compare {words.update_settings} with what the script itself does to gradients between backward and "
            f"step; try another {words.framework} version."
        )
        add("factor", () if everywhere else wrong, abs(ratio - 1.0), seen.tolerance, text, remedy)
    if seen.relative_error > seen.bound:
        text = (
            "What the optimizer applied is no multiple of the aggregated gradient: the error is "
            f"{seen.relative_error:.3g} of it, rounding explains at most {seen.bound:.2g}."
        )
        remedy = (
            "Look for code that changes gradients after the reduction; if that is meant, this check does not apply."
        )
        noisy = seen.noisy if len(seen.noisy) < world_size else ()
        add("applied", noisy, seen.relative_error, seen.bound, text, remedy)
    return findings


# -- in words ----------------------------------------------------------------------------------------------------------


def distrust(words: Words, ranks: tuple[int, ...], what: str = "") -> str:
    """Return what to do about a wrong aggregate: ``ranks`` are named, and ``what`` is the kind of its cause."""
    known = {
        "unreduced": words.not_reduced,
        "unsynchronised": words.not_synchronised,
        "leftover": words.not_cleared,
        "stale": words.stale,
        "changed": "Look first for code that changes gradients on some ranks only behind the reduction, as by clipping",
    }
    first = known.get(what) or "Look for a hook or other code of the script that changes gradients"
    back = "Do not trust the weights of this run since then; go back to the last checkpoint before it"
    look = ", and look at the network of the rank named" if ranks else ""
    return f"{first}. {back}. If that is not it, {words.another_reduction}{look}."


def cause_sentence(cause: Cause, layers: tuple[str, ...], world_size: int, result: str) -> str:
    """Return the cause in one sentence."""
    where = layers_text(cause.layers, layers)
    if cause.kind == "scale":
        assert cause.factor is not None
        shown = f"{cause.factor:.3g}" if abs(cause.factor - 1.0) > 0.005 else f"{cause.factor:.6g}"
        return f"It is {shown} times the {result} in {where}."
    if cause.kind == "weights":
        shown = _weights(cause, cause.ranks) or "by small amounts"
        return f"In {where} the ranks' gradients do not count once each: {shown}."
    if cause.kind == "partial":
        whose = named(cause.ranks or tuple(range(world_size)), world_size)
        shown = _weights(cause, cause.ranks or tuple(range(world_size)))
        what = f"Something of the gradient of {whose} is missing or counted more than once"
        return f"{what} in {where} ({shown}, on average)."
    factor = cause.factor or 0.0
    if cause.kind == "unreduced":
        alone = named(cause.ranks, world_size)
        return f"In {where} it is {factor:.3g} times the gradient of {alone} alone: it was not reduced."
    if cause.kind == "leftover" and 0 < len(cause.ranks) < world_size:
        whose = f"{named(cause.ranks).capitalize()} {'has' if len(cause.ranks) == 1 else 'have'}"
        return f"{whose} not cleared the gradients of the step before in {where}: they are in it again."
    return {
        "leftover": f"The gradients of the step before were not cleared in {where} and are in it again.",
        "zeroed": f"It is zero in {where}.",
        "stale": f"In {where} it is that of the step before.",
        "partly-zeroed": f"A part of {where} is missing that holds {factor:.2%} of the gradient's squared norm.",
        "element": f"A single element of {where}, or very few, are off, as after a bit flip.",
        "noise": f"No factor, rank or missing piece explains the error in {where}: it looks like noise, or like "
        "micro-batches that are missing or counted twice.",
    }[cause.kind]


def _weights(cause: Cause, ranks: tuple[int, ...]) -> str:
    """Rounded, and without a negative zero."""
    entered = [round(cause.weights[rank], 2) + 0.0 for rank in ranks]
    if len(ranks) > SHOWN_RANKS:
        return f"{min(entered):.2f} to {max(entered):.2f} times"
    return ", ".join(f"rank {rank} {weight:.2f} times" for rank, weight in zip(ranks, entered, strict=True))


def numbers_text(numbers: list[int]) -> str:
    """Consecutive ones as a range."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return listed(numbers, SHOWN_RANKS)


def who_received(groups: Parts, world_size: int) -> str:
    odd = outvoted(groups)
    if odd:
        return f"{named(odd, world_size).capitalize()} received something else than the other {world_size - len(odd)}."
    return f"There are {len(groups)} versions among {world_size} ranks, and none of them has a majority."


def layers_text(wrong: tuple[int, ...], layers: tuple[str, ...]) -> str:
    if len(wrong) == len(layers) > 1:
        return f"all {len(layers)} layers"
    return listed([layers[layer] for layer in wrong], SHOWN_LAYERS, "layers")


def rounded_weight(weight: float) -> float:
    """To a tenth, and without a negative zero."""
    return round(weight, 1) + 0.0
