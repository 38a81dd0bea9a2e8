"""A reduction, an optimizer's input or a replica that is not what it must be. Facts and bounds, no baselines.

Thresholds are the rounding bounds of ``ds_silent.integrity``; bits that must be equal are compared as bits. Nobody is
named where two ranks differ from each other and neither is more than half of all.
"""

from __future__ import annotations

from ds_silent.audit import Applied, Integrity
from ds_silent.causes import Cause
from ds_silent.detectors.evidence import Finding, named
from ds_silent.integrity import AggregateCheck
from ds_silent.records import StepRecord
from ds_silent.replicas import Drift, Groups

SHOWN_LAYERS = 3
_REDUCTION = (
    "Do not trust the weights of this run since then; go back to the last checkpoint before it, try another DeepSpeed "
    "version, overlap_comm false, or another communication_data_type, and look at the network of the rank named."
)


def integrity(record: StepRecord, seen: Integrity | None) -> list[Finding]:
    """Everything that is wrong at this step."""
    if seen is None:
        return []
    findings, layers = [], seen.layers
    if seen.check is not None and seen.check.wrong:
        findings.append(_aggregation(record, seen.check, seen.cause, layers, seen.received))
    elif seen.received:
        findings.append(_received(record, seen.received, layers))
    if seen.applied is not None:
        findings += _applied(record, seen.applied)
    if seen.replicas is not None and len(seen.replicas) > 1:
        findings.append(_drift(record, seen.replicas, seen.drift))
    return findings


def minority(groups: Groups, world_size: int) -> tuple[int, ...]:
    """The ranks outside a group of more than half of all; none without such a group."""
    if 2 * len(groups[0]) <= world_size:
        return ()
    return tuple(sorted(rank for group in groups[1:] for rank in group))


def _aggregation(
    record: StepRecord,
    check: AggregateCheck,
    cause: Cause | None,
    layers: tuple[str, ...],
    received: dict[int, Groups] | None,
) -> Finding:
    error, bound = check.relative_error, check.rounding_bound
    size = "no finite multiple of it" if error is None or bound is None else f"{error:.3g} of it"
    allowed = "" if bound is None else f", rounding explains at most {bound:.2g}"
    message = f"The aggregated gradient is not the mean of the ranks' gradients: the error is {size}{allowed}."
    kind, where, what = "aggregation-error", "aggregated gradient", "unexplained"
    ranks: tuple[int, ...] = ()
    if cause is not None:
        where, ranks, what = _where(cause.layers, layers), cause.ranks, cause.kind
        message += f" {_told(cause, where, record.world_size)}"
        if cause.kind == "unreduced":
            kind = "unreduced-gradient"
    if received:
        groups = next(iter(received.values()))
        message += f" {_who_received(groups, record.world_size)}"
        odd = minority(groups, record.world_size)
        if len(groups) == record.world_size > 1 and what != "leftover":
            kind, what = "unreduced-gradient", "unreduced"
            message += " Every rank holds another one, as when nothing was reduced there."
        ranks = ranks or odd
    key = f"integrity {what} {where}"
    return Finding(key, kind, "error", ranks, where, error, bound, message, _REDUCTION, record.step)


def _told(cause: Cause, where: str, world_size: int) -> str:
    """The cause in one sentence."""
    if cause.kind == "scale":
        return f"It is {cause.factor:.4g} times the mean in {where}."
    if cause.kind == "weights":
        shown = ", ".join(f"rank {rank} {cause.weights[rank]:.2f} times" for rank in cause.ranks[:8])
        return f"In {where} the ranks' gradients entered with other weights than 1: {shown or 'by small amounts'}."
    factor = cause.factor or 0.0
    if cause.kind == "unreduced":
        alone = named(cause.ranks, world_size)
        return f"In {where} it is {factor:.3g} times the gradient of {alone} alone: it was not reduced."
    return {
        "leftover": f"The gradients of the step before were not cleared in {where} and are in it again.",
        "zeroed": f"It is zero in {where}.",
        "stale": f"In {where} it is that of the step before.",
        "partly-zeroed": f"A part of {where} is missing that holds {factor:.2%} of the gradient's squared norm.",
        "element": f"A single element of {where}, or very few, are off, as after a bit flip.",
        "noise": f"No factor, rank or missing piece explains the error in {where}: it looks like noise, or like "
        "micro-batches that are missing or counted twice.",
    }[cause.kind]


def _received(record: StepRecord, received: dict[int, Groups], layers: tuple[str, ...]) -> Finding:
    """The checked slices add up to the mean, and yet ranks hold different bits elsewhere."""
    groups, where = next(iter(received.values())), _where(tuple(received), layers)
    odd = minority(groups, record.world_size)
    message = (
        f"The ranks hold different aggregated gradients in {where}: {_who_received(groups, record.world_size)} The "
        "difference is within rounding, or outside of what each rank checks."
    )
    key = f"integrity received {where}"
    return Finding(key, "aggregation-error", "error", odd, where, None, None, message, _REDUCTION, record.step)


def _who_received(groups: Groups, world_size: int) -> str:
    odd = minority(groups, world_size)
    if odd:
        return f"{named(odd, world_size).capitalize()} received something else than the other {world_size - len(odd)}."
    return f"There are {len(groups)} versions among {world_size} ranks, and none of them has a majority."


def _applied(record: StepRecord, seen: Applied) -> list[Finding]:
    world_size, findings = record.world_size, []

    def add(key: str, ranks: tuple[int, ...], score: float | None, bound: float | None, text: str, remedy: str) -> None:
        message, where = f"{text} (step {seen.step})", "applied gradient"
        findings.append(
            Finding(
                key, "aggregation-error", "error", ranks, where, score, bound, message, remedy, seen.step, seen.step
            )
        )

    if seen.idle:
        others = "and nothing says why" if len(seen.idle) == world_size else "although others' did: replicas are apart"
        text = f"The optimizer of {named(seen.idle, world_size)} did not step, {others}."
        remedy = "Look for code that skips optimizer.step() on some ranks, or for a loss scale that differs."
        add(f"integrity idle {seen.idle}", seen.idle, None, None, text, remedy)
    wrong = seen.wrong_factor
    if wrong:
        factors = [factor for rank in wrong if (factor := seen.factors[rank]) is not None]
        ratio = sum(factors) / len(factors) / seen.expected
        everywhere = len(wrong) == sum(factor is not None for factor in seen.factors)
        whose = "" if everywhere else f" on {named(wrong, world_size)}"
        text = f"The optimizer applied {ratio:.4g} times the aggregated gradient, unscaled and clipped{whose}."
        remedy = (
            "Compare gradient_clipping, the loss scale and gradient_accumulation_steps with what the script itself "
            "does to gradients between backward and step; try another DeepSpeed version."
        )
        add("integrity factor", () if everywhere else wrong, abs(ratio - 1.0), seen.tolerance, text, remedy)
    if seen.relative_error > seen.bound:
        text = (
            "What the optimizer applied is no multiple of the aggregated gradient: the error is "
            f"{seen.relative_error:.3g} of it, rounding explains at most {seen.bound:.2g}."
        )
        remedy = (
            "Look for code that changes gradients after the reduction; if that is meant, this check does not apply."
        )
        add("integrity applied", (), seen.relative_error, seen.bound, text, remedy)
    return findings


def _drift(record: StepRecord, groups: Groups, drift: Drift | None) -> Finding:
    odd = minority(groups, record.world_size)
    message = f"The replicas hold different bits: {_versions(groups, odd, record.world_size)}"
    where, since = "replica", record.step
    if drift is not None and drift.names:
        shown = ", ".join(drift.names[:SHOWN_LAYERS])
        more = f" and {len(drift.names) - SHOWN_LAYERS} more" if len(drift.names) > SHOWN_LAYERS else ""
        where = shown + more
        message += f" They differ in {where}."
        if drift.since is not None:
            since = max(drift.since, 0)
            message += f" The first update that left them apart was that of step {since}."
    remedy = (
        "Copy a healthy rank's weights and optimizer state, or go back to a checkpoint whose hashes agree; look for "
        "a rank that skips updates, for memory errors on it, and for parameters that are never reduced."
    )
    key = f"replicas {groups}"
    return Finding(key, "replica-drift", "error", odd, where, None, None, message, remedy, since)


def _versions(groups: Groups, odd: tuple[int, ...], world_size: int) -> str:
    if odd:
        return f"{named(odd, world_size)} {'differs' if len(odd) == 1 else 'differ'} from the others."
    listed = "; ".join(named(group) for group in groups[:4])
    return f"no group of equal ones is a majority ({listed}{'; …' if len(groups) > 4 else ''})."


def _where(wrong: tuple[int, ...], layers: tuple[str, ...]) -> str:
    if len(wrong) == len(layers) > 1:
        return f"all {len(layers)} layers"
    shown = ", ".join(layers[layer] for layer in wrong[:SHOWN_LAYERS])
    return shown + (f" and {len(wrong) - SHOWN_LAYERS} more layers" if len(wrong) > SHOWN_LAYERS else "")
