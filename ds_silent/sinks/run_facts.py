"""``run.json``: what was switched on when a run began, so that who reads its records knows what was not looked at.

text = run_text(config, framework="DeepSpeed", ranks=4, training=facts, observed={"replicas": True})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ds_silent.config import SilentConsistencyConfig
from ds_silent.extras import version_of

VERSION = 1
_PACKAGES = {"DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}
_MAY_HOLD_SECRETS = ("alerts",)  # addresses with tokens in them


def run_text(
    config: SilentConsistencyConfig,
    framework: str,
    ranks: int,
    training: Mapping[str, Any],
    observed: Mapping[str, bool],
) -> str:
    """JSON, an object.

    Args:
        training: what the framework's collectives follow from, as all ranks have agreed: JSON values.
        observed: what can be seen in this setting.
    """
    block = config.model_dump(mode="json")
    for key in _MAY_HOLD_SECRETS:
        if key in block:
            held = block[key]
            block[key] = f"{len(held)} left out" if isinstance(held, list) else "left out"
    facts = {
        "version": VERSION,
        "ds_silent": version_of("ds_silent"),
        "framework": framework,
        "framework_version": version_of(_PACKAGES.get(framework, "torch")),
        "torch": version_of("torch"),
        "world_size": ranks,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "training": dict(training),
        "observed": dict(observed),
        "block": block,
    }
    return json.dumps(facts, indent=1, default=str) + "\n"
