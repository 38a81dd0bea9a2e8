"""Where the records of a data-parallel group go: each has a directory of its own, where there are several.

label = label_of({"tp": (1, 2), "pp": (0, 1)})     # "tp1"
placed(config, label)                              # output_dir "runs/silent/tp1"
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_silent.config import SilentConsistencyConfig

Place = tuple[int, int]
"""(this rank's place, how many ranks)."""


def label_of(places: Mapping[str, Place]) -> str:
    """Of this rank's data-parallel group, from its place among the parts of the model; empty where there is one."""
    return "-".join(f"{name}{at}" for name, (at, of) in places.items() if of > 1)


def placed(config: SilentConsistencyConfig, label: str) -> SilentConsistencyConfig:
    """With that group's directory."""
    return config.model_copy(update={"output_dir": f"{config.output_dir}/{label}"}) if label else config
