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


def otherwise(other: Settings, adam: Any, lists: Lists, settings: Settings) -> None:
    """Go by other settings than the group's."""
    adam(*lists, **{**settings, **other})


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


def epsilon_inside(adam: Any, lists: Lists, settings: Settings) -> None:
    """Add epsilon below the root: to the second moment, as far as its bias is corrected."""
    *_, seconds, _, steps = lists
    beta2, eps = settings["beta2"], settings["eps"]
    added = [eps * (1.0 - beta2 ** (float(step) + 1.0)) for step in steps]
    for second, more in zip(seconds, added, strict=True):
        second.add_(more / beta2)
    adam(*lists, **{**settings, "eps": 0.0})
    for second, more in zip(seconds, added, strict=True):
        second.sub_(more).clamp_(min=0.0)


def only_counted(adam: Any, lists: Lists, settings: Settings) -> None:
    """Count the step, and leave weights and state as they are."""
    for step in lists[-1]:
        step += 1


def without_memory(adam: Any, lists: Lists, settings: Settings) -> None:
    """Forget both moments before each step."""
    for moment in (*lists[2], *lists[3]):
        moment.zero_()
    adam(*lists, **settings)


# A table reads better than what a formatter makes of it.
# fmt: off
_ROWS: tuple[tuple[str, Change, str, str], ...] = (
    ("decay-left-out", partial(otherwise, {"weight_decay": 0.0}), "leaves the weight decay out", "no weight decay"),
    ("decay-coupled", partial(otherwise, {"decoupled_weight_decay": False}), "adds the weight decay to the gradient",
     "coupled with the gradient"),
    ("bias-correction-left-out", without_bias_correction, "corrects no bias of its moments", "no bias correction"),
    ("momentum-left-out", partial(otherwise, {"beta1": 0.0}), "keeps no momentum", "beta1 is 0 instead of 0.9"),
    ("second-beta-changed", partial(otherwise, {"beta2": 0.95}), "has another second beta", "beta2 is 0.95"),
    ("epsilon-inside-the-root", epsilon_inside, "adds epsilon below the root", "epsilon inside the root"),
    ("state-forgotten", without_memory, "forgets its moments", "none of the known mistakes explains it"),
    ("sign-turned", partial(otherwise, {"maximize": True}), "climbs", "the sign of the gradient is turned"),
    ("update-only-counted", only_counted, "counts, and does nothing else", "the update was not applied"),
    ("update-applied-twice", twice, "applies each update twice", "applied twice"),
    ("rate-doubled-in-the-step", doubled_rate, "goes by twice the group's rate", "the rate is 2 times"),
    ("tensor-not-stepped", without_first, "leaves the optimizer's first tensor as it is", "not applied"),
)
# fmt: on
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
