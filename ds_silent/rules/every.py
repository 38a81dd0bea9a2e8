"""Make the rules of a training, the same on every rank."""

from __future__ import annotations

from ds_silent.config import SilentConsistencyConfig
from ds_silent.framework import Framework
from ds_silent.rules.batch import BatchContents
from ds_silent.rules.causal_probe import CausalProbe
from ds_silent.rules.rule import Rule
from ds_silent.rules.weights import WeightsInUse


def rules_of(framework: Framework, config: SilentConsistencyConfig) -> list[Rule]:
    """Return every rule that applies to this framework; none where the block switches them off."""
    if not (config.rules and config.detectors.enabled):
        return []
    rules: list[Rule] = [BatchContents(framework)]
    if (
        config.resync.mode == "off" and config.respond.on_replica_drift != "mean"
    ):  # they average masters and copies apart
        rules.append(WeightsInUse(framework))
    if config.probe:
        rules.append(CausalProbe(framework))
    return rules
