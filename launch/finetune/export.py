"""The trained weights out of the engine, and into a directory that ``AutoModelForCausalLM`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch

from finetune.models import LoadedModel, save
from finetune.ranks import Ranks


def save_model(engine: Any, loaded: LoadedModel, directory: Path, ranks: Ranks) -> None:
    """Writes Hugging Face files on rank 0. A collective: under ZeRO 3 parameters are gathered one at a time."""
    state: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}  # tied parameters stay one tensor
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if ranks.is_first:
                state[name] = shared.setdefault(id(parameter), parameter.detach().cpu().clone())
    if ranks.is_first:
        persistent = engine.module.state_dict().keys()
        state.update((name, buffer.cpu()) for name, buffer in engine.module.named_buffers() if name in persistent)
        save(loaded, engine.module, directory, state)
