"""Check that a model that was trained in training mode is not trained in evaluation mode, once it was evaluated.

A script that evaluates between two steps calls ``model.eval()``, and has to call ``model.train()`` behind it. Where it
does not, dropout is off and BatchNorm's running statistics stand still from then on, on every rank alike, and the loss
falls. A model that was never trained in training mode is meant so, and so is one whose normalisations alone are in
evaluation mode. A note where a new optimizer steps from then on: a stage of its own may be meant so. Silent: a change
of mode that no evaluation preceded, and models without such modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.preflight.inventory import dropout_probabilities
from ds_silent.records import Severity
from ds_silent.rules.language_models import pretrained
from ds_silent.rules.rule import Breach, Rule

_NEVER = 3  # measured
_STEPS = 2  # measured, in a row: one may be a step of another kind
_SHOWN = 2


class TrainingMode(Rule):
    """Follow the mode of the model's forwards on this rank."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._trained = self._evaluated = False  # in training mode, ever; in evaluation mode, without gradients, since
        self._in_training = self._in_evaluation = False  # forwards with gradients since the last measured step
        self._steps = self._since = 0  # measured, all forwards of which were in evaluation mode; the first
        self._untrained = 0  # measured, in evaluation mode
        self._optimizers: tuple[int, ...] = ()  # ids of those that stepped in training mode last
        self._stage = False  # others step since the model is trained in evaluation mode
        self._drops: bool | None = None  # the model has dropout, once that was looked at
        self._off = ""  # what evaluation mode switches off

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each forward."""
        patches.hook(self._framework.module.register_forward_pre_hook, partial(safely, self._forward))

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        trains = torch.is_grad_enabled()
        if module.training and trains:
            self._trained, self._evaluated, self._in_training = True, False, True
        elif not module.training and trains:
            self._in_evaluation = True
        elif not module.training:
            self._evaluated = self._trained

    def breaches(self) -> tuple[Breach, ...]:
        stays = self._evaluated and self._in_evaluation and not self._in_training
        self._steps = self._steps + 1 if stays else 0
        self._untrained = self._untrained + 1 if self._in_evaluation else 0
        self._in_training = self._in_evaluation = False
        optimizers = tuple(map(id, self._framework.optimizers()))
        if not stays:
            self._optimizers = optimizers
        if self._steps == 1:
            self._since, self._off = self._framework.step, _switched_off(self._framework.module)
            self._stage = optimizers != self._optimizers
        if self._steps < _STEPS or not self._off:
            return self._never()
        message = (
            f"The model is trained in evaluation mode since step {self._since}: {self._off}. It was trained in "
            "training mode before, until it was evaluated."
        )
        remedy = (
            "Call model.train() behind each evaluation, before the next training forward. Go back to the checkpoint "
            "before this step if the model needs what was off."
        )
        severity: Severity = "warning"
        effects: tuple[str, ...] = ("outlier-rank",)  # each rank's running statistics are its own
        if self._stage:
            effects, severity, remedy = (
                (),
                "info",
                f"Do nothing if the stage that begins there is meant so. Else: {remedy}",
            )
            message += " Another optimizer steps since then."
        where = "training mode"
        return (Breach("mode", "update-mismatch", severity, where, message, remedy, self._since, effects),)

    def _never(self) -> tuple[Breach, ...]:
        """Note a model of transformers whose dropout is off since ``from_pretrained``, which sets evaluation mode."""
        kind = pretrained()
        if self._trained or self._untrained < _NEVER or kind is None or not isinstance(self._framework.module, kind):
            return ()
        if self._drops is None:
            self._drops = bool(dropout_probabilities(self._framework.module))
        if not self._drops:
            return ()
        message = (
            "The model has been trained in evaluation mode from the first step on, as from_pretrained leaves it: its "
            "dropout is off."
        )
        remedy = "If that is meant, do nothing. Else call model.train() before the first step."
        return (Breach("never", "update-mismatch", "info", "training mode", message, remedy, 1),)


def _switched_off(model: nn.Module) -> str:
    """Say what of a model behaves otherwise in evaluation mode; empty where nothing does."""
    off = {name: inner for name, inner in model.named_modules() if not inner.training}
    drops = [name for name in dropout_probabilities(model) if name in off]
    norms = [name for name, inner in off.items() if isinstance(inner, _NormBase) and inner.track_running_stats]
    dropout = f"dropout is off (in {listed(drops, _SHOWN)})" if drops else ""
    statistics = f"running statistics are used and stand still (in {listed(norms, _SHOWN)})" if norms else ""
    return " and ".join(filter(None, (dropout, statistics)))
