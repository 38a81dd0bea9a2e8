"""Find the causal language model of transformers in a training, and the inputs of its forward by their names.

    model = causal_model(framework.module)       # None where there is none, or several
    inputs = inputs_of(model, args, kwargs)      # {"input_ids": ..., "labels": ...}

Nothing of transformers is imported: a script that has such a model has imported it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

_HEAD = re.compile("ForCausalLM|LMHead")  # asking a model without one for its loss makes transformers warn


def causal_model(module: nn.Module) -> nn.Module | None:
    """Return the outermost causal language model, below wrappers such as PEFT's; None where there is not exactly one.

    It is causal by its own word: its loss is ``ForCausalLMLoss``, and each of its attention modules says ``is_causal``
    (a BERT that is no decoder has the same loss).
    """
    models = list(_outermost(module))
    if len(models) != 1 or not _HEAD.search(type(models[0]).__name__) or not shifts_labels(models[0]):
        return None
    said: list[Any] = [one.is_causal for one in models[0].modules() if hasattr(one, "is_causal")]
    return models[0] if said and all(value is True for value in said) else None


def pretrained() -> type | None:
    """Return the class of transformers' models, if the script has imported it."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    kind = pretrained()
    if kind is None:
        return
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def shifts_labels(module: nn.Module) -> bool:
    """Tell whether position i of the labels is what position i - 1 predicts: in transformers' decoders."""
    causal = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    encodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return causal is not None and getattr(module, "loss_function", None) is causal and not encodes


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` has taken the module or a part of it.

    ``torch.compile(module)`` is a module around it, ``module.compile()`` keeps the compiled call beside it (torch 2.4
    to 2.13).
    """
    return any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None for one in module.modules()
    )


def inputs_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments by the names of its parameters."""
    names = inspect.signature(model.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}
