"""Rules that need no other rank: what a configuration, a framework or an optimizer promises, and what happens.

rules_of(framework, config)      # of a training, the same on every rank
"""

from __future__ import annotations

from ds_silent.config import SilentConsistencyConfig
from ds_silent.framework import Framework
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
from ds_silent.rules.rule import Rule
from ds_silent.rules.training_mode import TrainingMode
from ds_silent.rules.weights_in_use import GatheredWeights, WeightsInUse


def rules_of(framework: Framework, config: SilentConsistencyConfig) -> list[Rule]:
    """Return every rule that applies to this framework; none where the block switches them off."""
    if not (config.rules and config.detectors.enabled):
        return []
    of_calls = (ClearedGradients, Clipping, EmptyStep, SteppedAgain, ScaledStep, StaleCasts)
    of_loop = (*of_calls, NoGradient, OutsideModel, AverageUpdates)
    of_model = (
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
    )
    rules: list[Rule] = [kind(framework) for kind in (RateRule, *of_loop, *of_model)]
    rules += framework.own_rules
    averages = config.resync.mode != "off" or config.respond.on_replica_drift == "mean"
    if not averages:  # else masters and their copies are averaged by themselves
        rules.append(WeightsInUse(framework))
    if not averages and config.respond.on_replica_drift == "report":  # else weights change before a step
        rules.insert(0, UpdateRule(framework, config.interval))
    return [*rules, CausalProbe(framework)] if config.probe else rules
