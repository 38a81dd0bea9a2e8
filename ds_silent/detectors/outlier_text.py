"""Say in words how a rank differs from the others, or from its own past."""

from __future__ import annotations

from typing import Any

from ds_silent.detectors.at_once import StandsOut
from ds_silent.detectors.comparisons import Strongest
from ds_silent.detectors.finding import Finding
from ds_silent.records import Event
from ds_silent.text import named

_MEANING = {
    ("loss", 1): "a higher loss than {against} (given its tokens)",
    ("loss", -1): "a lower loss than {against} (given its tokens)",
    ("gradient norm", 1): "larger gradients than {against} (given its loss and its tokens)",
    ("gradient norm", -1): "smaller gradients than {against} (given its loss and its tokens)",
    ("gradient direction", 1): "a gradient that agrees with the others' mean more than {theirs}",
    ("gradient direction", -1): "a gradient that agrees with the others' mean less than {theirs}",
}
_SPREAD = "a {where} further from the others' than theirs are from each other, above or below (given its tokens)"
_OTHERS = {"against": "the others", "theirs": "theirs do"}
_OWN_PAST = {"against": "before", "theirs": "before"}
_AT_ONCE = "a far {size} {where} {against}, {when}: no noise explains it"


def meaning_of(found: Strongest, own_past: bool) -> str:
    """Return what a lasting difference is, and since when."""
    meaning = _SPREAD if found.spread else _MEANING[found.statistic, found.onset.sign]
    meaning = meaning.format(where=found.statistic, **(_OWN_PAST if own_past else _OTHERS))
    return f"{meaning}, since about step {found.onset.step}"


def at_once_in_words(apart: StandsOut, step: int, random: bool) -> dict[str, str]:
    """Return what a difference is that no noise explains, and when it was."""
    when = "at this step" if apart.since == step else f"since step {apart.since}"
    against = "than all others" if random else "than before"
    size = "larger" if apart.sign > 0 else "smaller"
    return {"meaning": _AT_ONCE.format(size=size, where=apart.quantity, against=against, when=when), "when": when}


def message_of(rank: int, flag: dict[str, Any], random: bool) -> str:
    """Return the sentences of a flagged rank.

    Args:
        random: whether rows are dealt at random.
    """
    ranks, since = tuple(flag["ranks"]), flag["since"]
    if len(ranks) == 2 and (flag["severity"] != "info" or random):
        when = flag.get("when", f"since about step {since}")
        return (
            f"{named(ranks).capitalize()} disagree in their {flag['where']} {when}; with two ranks to compare "
            f"nobody can say which of them is wrong. Rank {rank} against rank {sum(ranks) - rank}: "
            f"{flag['numbers']}. {flag['why']}"
        )
    if flag["severity"] == "info" and not random:
        when = "the beginning" if since <= 1 else f"about step {since}"
        beside = " and its own past" if flag["own_past"] else ""
        if len(ranks) == 2:
            return (
                f"The data of {named(ranks)} are of unlike kinds since {when}. Rank {rank} against "
                f"rank {sum(ranks) - rank}{beside}: {flag['numbers']}. Other rows on one of them look like this."
            )
        return (
            f"Rank {rank}'s data are of another kind since {when}. Against the others{beside}: {flag['numbers']}. "
            "Other rows on this rank look like this."
        )
    return f"Rank {rank} has {flag['meaning']}. Against the others: {flag['numbers']}. {flag['why']}"


def note_of(step: int, rank: int, flag: dict[str, Any], random: bool) -> Event:
    """Return the note of a change that the rank's rows may have made."""
    message, remedy = message_of(rank, flag, random), f"Look at {flag['look_at']}."
    ranks, score, threshold = tuple(flag["ranks"]), flag["score"], flag["threshold"]
    return Event(step, "outlier-rank", "info", ranks, flag["where"], score, threshold, message, remedy)


def finding_of(rank: int, flag: dict[str, Any], random: bool) -> Finding:
    """Return the finding of a flagged rank."""
    return Finding(
        f"outlier-rank:{rank}",
        "outlier-rank",
        flag["severity"],
        tuple(flag["ranks"]),
        flag["where"],
        flag["score"],
        flag["threshold"],
        message_of(rank, flag, random),
        f"Look at {flag['look_at']}.",
        flag["since"],
        guess=flag["why"],
        log_excess=flag["score"] - flag["threshold"],
        effect=flag["effect"],
    )
