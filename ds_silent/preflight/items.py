"""What the preflight compares: one item for each thing that must be alike, or must not.

item_of("learning rate", "optimizer", "0.001")             # equal on every rank
check_item("sampler's share", "sampler", ok, "rank 1 of 8")  # what a rank can check by itself
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ds_silent.maths.fingerprint import Hash, hash_text, shown_hash
from ds_silent.records import Severity

Expectation = Literal["equal", "alike", "different", "passed", "free", "better different"]
"""``alike``: the same on all ranks, or another on every rank (generators: both are policies, a mixture is none).
``better different``: the same on all ranks is said, and no fault.
``passed``: each rank's own check, see :func:`check_item`."""
Group = Literal[
    "weights", "parameters", "generators", "sampler", "optimizer", "config", "code", "environment", "objective"
]
GROUPS: tuple[Group, ...] = get_args(Group)
Hashes = npt.NDArray[np.int32]
PASSED = hash_text("passed")
SUBSET = "the data set's subset"
HOOKS, ALL_HOOKS, MODULES_HOOKS = "hooks on gradients", "all hooks on gradients", "hooks on modules"
JOINT = "; "
"""Between the parts of a value that is a list: of two such values an event shows what only one of them has."""


@dataclass(frozen=True)
class Item:
    """One thing that is compared. All fields but ``shown`` and ``hash`` must be the same on every rank."""

    name: str
    group: Group
    expectation: Expectation
    shown: str  # the value, for people
    hash: Hash  # of the whole value
    severity: Severity = "error"


def item_of(
    name: str,
    group: Group,
    value: str | Hash | Callable[[], str],
    shown: str | None = None,
    expectation: Expectation = "equal",
    severity: Severity = "error",
) -> Item:
    """Make an item of a whole value, its hash, or its reader, which may fail; ``shown``: instead of the value."""
    if callable(value):
        try:
            value = value()
        except Exception as error:  # the others must still get this rank's list
            value = f"cannot be read ({type(error).__name__})"
    text, digest = (value, hash_text(value)) if isinstance(value, str) else (shown_hash(value), value)
    return Item(name, group, expectation, text if shown is None else shown, digest, severity)


def check_item(name: str, group: Group, ok: bool, shown: str, severity: Severity = "error") -> Item:
    """Make an item of what this rank found out by itself; ``shown`` is what it found, right or wrong."""
    return Item(name, group, "passed", shown, PASSED if ok else hash_text(f"not passed: {shown}"), severity)
