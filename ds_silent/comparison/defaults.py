"""Settings and versions in which two trainings differ, and which of them can make a link of the chain part.

    found = setting_differences(head_a, head_b)
    explaining("applied", found)             # gradient_clipping: 0 in A, 1.0 in B (its default)

A setting that only says how the work is shared (ranks, micro-batches, buckets, places of files) parts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_silent.text import shown
from ds_silent.trace import Head

SHARES = re.compile(
    r"micro.?batch|world.?size|ranks\b|(local|global|node).?rank|\bhost|\bnode|\bport\b|device|output\b|path|dir\b|file|"
    r"bucket|overlap|contiguous|zero_optimization\.stage|accumulation_steps|workers|thread|log(ging|s)?(\b|_)|print|"
    r"interval|update.s? (not )?check",
    re.IGNORECASE,
)
"""Names of settings that follow from another number of ranks, or move no number but by rounding."""
OF_GROUP = re.compile(r"(.+) of group \d+")
"""The name of a setting that is listed for each group of parameters, because the groups differ in it."""
PRECISION = "precision of the gradients"
OF_MODEL = "model: "
"""Begins the names of settings of the model's modules, such as ``model: eps`` of its norms."""
EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "rows": ("sampler", "shuffle", "drop_last", "seed", "epoch", "batch"),
    "weights": ("seed", "init", "checkpoint", "precision of the trainable"),
    "loss": ("smoothing", "dropout", "attention", "loss", OF_MODEL, "autocast", "precision of the", "tf32", "seed"),
    "local": ("attention", "dropout", OF_MODEL, "autocast", "precision of the", "loss scale", "tf32", "accum"),
    "reduced": ("communication_data_type", "prescale", "predivide", "reduc"),
    "applied": ("clip", "max_norm", "loss scale"),
    "update": (
        *("decay", "eps", "betas", "momentum", "nesterov", "dampening", "amsgrad", "maximize", "precision of what"),
        *("optimizer", "lr", "rate", "schedule"),
    ),
    "rates": ("lr", "rate", "schedule", "warmup"),
}
"""Link: how words begin in names of settings that can move it, the likeliest first."""


@dataclass(frozen=True)
class SettingDifference:
    """One setting; a value is None, and so is where it comes from, for the training that does not name it."""

    name: str
    a: Any
    b: Any
    from_a: str | None
    from_b: str | None
    shares: bool  # the work, and no more

    @property
    def foreign(self) -> bool:
        """Whether only one of the two names it, and nobody has set it: another framework's."""
        return None in (self.from_a, self.from_b) and "yours" not in (self.from_a, self.from_b)

    @property
    def sentence(self) -> str:
        """``gradient_clipping: 0.0 in A, 1.0 in B, a default that changed``."""
        values = [
            "not named" if origin is None else f"{shown(value, 40)}{' by default' * (origin == 'default')}"
            for value, origin in ((self.a, self.from_a), (self.b, self.from_b))
        ]
        changed = ", a default that changed" if self.from_a == self.from_b == "default" else ""
        return f"{self.name}: {values[0]} in A, {values[1]} in B{changed}"


def setting_differences(a: Head, b: Head) -> tuple[SettingDifference, ...]:
    """Return them in the order of A's settings, B's own last."""
    found = []
    of_model = all(any(name.startswith(OF_MODEL) for name in head.settings) for head in (a, b))  # not in older traces
    ours, theirs = _by_group(a.settings, b.settings), _by_group(b.settings, a.settings)
    for name in dict.fromkeys([*ours, *theirs]):
        (one, from_a), (other, from_b) = setting_of(ours, name), setting_of(theirs, name)
        if name.startswith(OF_MODEL) and not of_model:
            continue
        if one != other or (from_a is None) != (from_b is None):
            found.append(SettingDifference(name, one, other, from_a, from_b, bool(SHARES.search(name))))
    if a.precision != b.precision:
        found.append(SettingDifference(PRECISION, a.precision, b.precision, "framework", "framework", False))
    return tuple(found)


def _by_group(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """List a setting for each group where the other training does: here all groups have the same value."""
    groups: dict[str, list[str]] = {}
    for name in others:
        if (of_group := OF_GROUP.fullmatch(name)) is not None:
            groups.setdefault(of_group[1], []).append(name)
    return {label: held for name, held in settings.items() for label in groups.get(name, [name])}


def setting_of(settings: Mapping[str, Any], name: str) -> tuple[Any, str | None]:
    """Return a setting's value and where it comes from; None for both where it is not listed."""
    held = settings.get(name)
    if isinstance(held, Mapping) and "value" in held:
        return held["value"], str(held.get("from"))
    return (None, None) if name not in settings else (held, "")


def explaining(link: str, found: Iterable[SettingDifference], likely: str = "") -> SettingDifference | None:
    """Return the likeliest setting that explains why a link parts; ``likely``: a part of its name, asked first."""
    forward = link in ("loss", "local")  # the optimizer has an epsilon and a momentum of its own
    candidates = [one for one in found if not one.shares and (forward or not one.name.startswith(OF_MODEL))]
    if link in ("update", "rates"):  # another kind of optimizer has other settings too
        candidates.sort(key=lambda one: one.name != "optimizer")
        likely = "optimizer" if candidates and candidates[0].name == "optimizer" else likely
    for word in (likely, *EXPLAINS.get(link, ())) if likely else EXPLAINS.get(link, ()):
        for one in candidates:
            if re.search(f"(?<![a-z]){re.escape(word)}", one.name.lower()):
                return one
    return None


def version_differences(a: Head, b: Head) -> tuple[str, ...]:
    """``torch 2.6.0 in A, 2.8.0 in B``, of each package whose version differs."""
    names = dict.fromkeys([*a.versions, *b.versions])
    return tuple(
        f"{name} {shown(a.versions.get(name), 30)} in A, {shown(b.versions.get(name), 30)} in B".replace('"', "")
        for name in names
        if a.versions.get(name) != b.versions.get(name)
    )
