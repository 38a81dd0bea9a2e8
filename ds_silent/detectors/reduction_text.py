"""Say in words what is wrong with a reduction: the cause, the ranks, the layers, and what to do."""

from __future__ import annotations

from ds_silent.distributed.parts import SHOWN_RANKS, Parts, listed, outvoted
from ds_silent.maths.causes import Cause
from ds_silent.text import Words, named

SHOWN_LAYERS = 3


def distrust(words: Words, ranks: tuple[int, ...], what: str = "") -> str:
    """What to do about a wrong aggregate: ``ranks`` are named, and ``what`` is the kind of its cause."""
    first = {"unreduced": words.not_reduced, "leftover": words.not_cleared}.get(what, "")
    back = "Do not trust the weights of this run since then; go back to the last checkpoint before it"
    look = ", and look at the network of the rank named" if ranks else ""
    script = "Look for a hook or other code of the script that changes gradients"
    return f"{first or script}. {back}. If that is not it, {words.another_reduction}{look}."


def cause_sentence(cause: Cause, layers: tuple[str, ...], world_size: int, result: str) -> str:
    """The cause in one sentence."""
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
        return f"Something of the gradient of {whose} is missing or counted twice in {where} ({shown}, on average)."
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


def versions_text(groups: Parts, odd: tuple[int, ...], world_size: int) -> str:
    if odd:
        return f"{named(odd, world_size)} {'differs' if len(odd) == 1 else 'differ'} from the others."
    shown = "; ".join(named(group) for group in groups[:4])
    return f"no group of equal ones is a majority ({shown}{'; …' if len(groups) > 4 else ''})."


def layers_text(wrong: tuple[int, ...], layers: tuple[str, ...]) -> str:
    if len(wrong) == len(layers) > 1:
        return f"all {len(layers)} layers"
    return listed([layers[layer] for layer in wrong], SHOWN_LAYERS, "layers")


def rounded_weight(weight: float) -> float:
    """To a tenth, and without a negative zero."""
    return round(weight, 1) + 0.0
