"""``--json FILE`` of the commands: refused before minutes of work, written after them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ds_silent.config import ConfigError


def refuse_unwritable(path: str | None) -> None:
    """Minutes later is too late to find that out.

    Raises:
        ConfigError: there is a path, and nothing can be written there.
    """
    if path is not None and (os.path.isdir(path) or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)):
        raise ConfigError(f"--json {path!a} cannot be written; give a file in a directory that can")


def write_json(path: str | None, value: Any) -> None:
    """``value`` holds JSON's own types and finite numbers; without a path nothing is written."""
    if path is not None:
        Path(path).write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8")
