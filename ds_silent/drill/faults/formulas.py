"""An optimizer's step that does something else than its formula, on every rank alike.

FORMULA_FAULTS                               # rows of the catalogue
injection.update(optimizer, run, step=4)     # torch's Adam updates the weights in another way inside run()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from ds_silent.drill.faults.fault import EARLY, Fault
from ds_silent.drill.faults.injection import Injection, Target, from_on

Lists = tuple[list[Any], ...]
Settings = dict[str, Any]
Change = Callable[[Any, Lists, Settings], None]


def other_formula(change: Change, target: Target, me: int) -> Injection:
    """Call ``change(adam, lists, settings)`` where torch's Adam calls the function that updates the weights."""

    def update(optimizer: Any, run: Callable[[], Any], step: int) -> Any:
        module = importlib.import_module("torch.optim.adam")
        adam = module.adam
        with mock.patch.object(module, "adam", lambda *lists, **settings: change(adam, lists, settings)):
            return run()

    return Injection(update=update)


def without_decay(adam: Any, lists: Lists, settings: Settings) -> None:
    """Leave the weight decay out."""
    adam(*lists, **{**settings, "weight_decay": 0.0})


def without_bias_correction(adam: Any, lists: Lists, settings: Settings) -> None:
    """Correct the moments as if a million steps had been taken."""
    *others, steps = lists
    adam(*others, [torch.full_like(step, 1e6) for step in steps], **settings)
    for step in steps:
        step += 1


def twice(adam: Any, lists: Lists, settings: Settings) -> None:
    """Update once more."""
    adam(*lists, **settings)
    adam(*lists, **settings)


def without_first(adam: Any, lists: Lists, settings: Settings) -> None:
    """Leave the first tensor as it is."""
    adam(*([*each[1:]] for each in lists), **settings)


def doubled_rate(adam: Any, lists: Lists, settings: Settings) -> None:
    """Go by twice the group's rate."""
    adam(*lists, **{**settings, "lr": 2.0 * settings["lr"]})


_ROWS: tuple[tuple[str, Change, str, str], ...] = (
    ("decay-left-out", without_decay, "leaves the weight decay out", "no weight decay"),
    ("bias-correction-left-out", without_bias_correction, "corrects no bias of its moments", "no bias correction"),
    ("update-applied-twice", twice, "applies each update twice", "applied twice"),
    ("rate-doubled-in-the-step", doubled_rate, "goes by twice the group's rate", "the rate is 2 times"),
    ("tensor-not-stepped", without_first, "leaves the optimizer's first tensor as it is", "not applied"),
)
FORMULA_FAULTS = tuple(
    Fault(
        name,
        from_on(partial(other_formula, change)),
        f"the optimizer's step {what} on all ranks",
        who="nobody",
        kinds=("update-mismatch",),
        strikes="update",
        deterministic=False,  # told at the next step, which reads what this one has left
        first_step=EARLY,
        says=(words,),
        expected_overrides={"ddp": {"dtypes": ("fp32",)}},  # bf16 weights without masters round away what is small
    )
    for name, change, what, words in _ROWS
)
