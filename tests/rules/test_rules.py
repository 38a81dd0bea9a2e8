"""Which rules a training has: none that a block switches off, and none that a response to drift would make lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_silent.config import SilentConsistencyConfig, parse
from ds_silent.rules import rules_of
from ds_silent.rules.averages import AverageUpdates
from ds_silent.rules.batch import BatchContents, OverwrittenLabels
from ds_silent.rules.call_order import Clipping, EmptyStep, ScaledStep, StaleCasts, SteppedAgain
from ds_silent.rules.causal_probe import CausalProbe
from ds_silent.rules.cleared import ClearedGradients
from ds_silent.rules.first_look import FirstLook
from ds_silent.rules.initial_weights import InitialWeights
from ds_silent.rules.loads import LostState
from ds_silent.rules.loss_input import LossInput
from ds_silent.rules.no_gradient import NoGradient
from ds_silent.rules.optimizer_update import UpdateRule
from ds_silent.rules.outside_model import FrozenBeside, OutsideModel
from ds_silent.rules.rates import RateRule
from ds_silent.rules.recomputation import RecomputedDraws
from ds_silent.rules.training_mode import TrainingMode
from ds_silent.rules.weights_in_use import GatheredWeights, WeightsInUse

OF_CALLS = [ClearedGradients, Clipping, EmptyStep, SteppedAgain, ScaledStep, StaleCasts]
OF_LOOP = [*OF_CALLS, NoGradient, OutsideModel, AverageUpdates]
ALWAYS = [
    RateRule,
    *OF_LOOP,
    BatchContents,
    OverwrittenLabels,
    LossInput,
    TrainingMode,
    RecomputedDraws,
    GatheredWeights,
    FirstLook,
    InitialWeights,
    LostState,
    FrozenBeside,
]
ALL = [UpdateRule, *ALWAYS, WeightsInUse]
BLOCKS: list[tuple[dict[str, Any], list[type]]] = [
    ({}, ALL),
    ({"rules": False}, []),
    ({"detectors": {"enabled": False}}, []),
    ({"probe": True}, [*ALL, CausalProbe]),
    ({"resync": {"mode": "periodic"}}, ALWAYS),
    ({"respond": {"on_replica_drift": "mean"}}, ALWAYS),
    ({"respond": {"on_replica_drift": "majority"}}, [*ALWAYS, WeightsInUse]),
]


def config_of(block: dict[str, Any]) -> SilentConsistencyConfig:
    config = parse({"silent_consistency": block})
    assert config is not None
    return config


@pytest.mark.parametrize(("block", "rules"), BLOCKS)
def test_a_block_has_these_rules(block: dict[str, Any], rules: list[type]) -> None:
    framework: Any = SimpleNamespace(parameters=[], names=[], own_rules=())
    assert [type(rule) for rule in rules_of(framework, config_of(block))] == rules


def test_updates_are_looked_at_in_measured_steps() -> None:
    framework: Any = SimpleNamespace(parameters=[], names=[], own_rules=())
    (rule, *_) = rules_of(framework, config_of({"interval": 7}))
    assert rule._interval == 7  # type: ignore[attr-defined]
