"""Check once, at the first measured step, what a model and its parameter groups are against what they say they are.

* A transformers model that ties its embeddings, by its configuration, holds them as one parameter: else a warning.
* A group without weight decay, beside one that differs in the decay alone, is there for biases and normalisations. A
  note if it is empty or holds none of the normalisations' weights: their names were looked for in vain.
* A group with a learning rate of its own holds parameters: else a note.
* A LoRA adapter is scaled by alpha / r (by alpha / sqrt(r) with rsLoRA), of peft's ``alpha_pattern`` and
  ``rank_pattern`` where one of their names ends that of its module: else a warning.
* LoRA adapters are in peft's ``layers_to_transform`` alone: else a warning.
* Rotary frequencies (``inv_freq``) are fp32: a note if the model was cast to bf16 or fp16 with them.
* Adam's second moment can fall: a note where torch keeps it in bf16, as the weights are, and ``beta2`` times a number
  is rounded back to it.
* What a script loads arrives, see :mod:`ds_silent.rules.loads`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.rules.known_optimizers import number
from ds_silent.rules.loads import unlike_file, vain_load
from ds_silent.rules.rule import Breach, Rule

_SHOWN = 3
_DECAYS = ("params", "weight_decay", "param_names", "name")
"""What two groups may differ in that differ in their decay alone."""
_PLACE = 1000  # in a sequence, for which the error of an angle is told


class FirstLook(Rule):
    """Look once; what is found stays."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._found: tuple[Breach, ...] | None = None

    def breaches(self) -> tuple[Breach, ...]:
        if self._found is None:
            self._found = tuple(found for look in _LOOKS if (found := look(self._framework)) is not None)
        return self._found


def _untied(framework: Framework) -> Breach | None:
    model = framework.module
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    promised = [getattr(one, "tie_word_embeddings", False) is True for one in (config, text)]
    if not (all(promised) and getattr(model, "_tied_weights_keys", None)):
        return None
    first = _trained_weight(model, "get_input_embeddings", nn.Embedding)
    last = _trained_weight(model, "get_output_embeddings", nn.Linear)
    if first is None or last is None or first is last or first.shape != last.shape:
        return None
    names = {id(held): name for name, held in model.named_parameters()}
    message = (
        "The model's configuration ties the embeddings of input and output (tie_word_embeddings), but they are two "
        f"parameters, {names.get(id(first))} and {names.get(id(last))}: each is trained by itself, and a saved model "
        "keeps one of them."
    )
    remedy = (
        "Call model.tie_weights() behind what replaced one of them, and before the optimizer is made; under "
        "fully_shard keep both in one group. If they are meant to be apart set config.tie_word_embeddings = False."
    )
    return Breach("tied", "update-mismatch", "warning", "tied embeddings", message, remedy, framework.step)


def _trained_weight(model: nn.Module, getter: str, kind: type[nn.Module]) -> Tensor | None:
    """Return the weight of an embedding, and of no adapter in its place, whose own is another matter."""
    try:
        held = getattr(model, getter)()
    except Exception:  # not every model has one
        return None
    weight = held.weight if isinstance(held, kind) or hasattr(held, "modules_to_save") else None  # peft's copy is used
    return weight if isinstance(weight, nn.Parameter) and weight.requires_grad else None


def _decayed_norms(framework: Framework) -> Breach | None:
    settings, held = _groups(framework)
    norms = {id(p): name for name, p in _weights_of_norms(framework.module)}
    dimensions = {id(p): len(shape) for p, shape in zip(framework.parameters, framework.shapes, strict=True)}
    for place, without in enumerate(settings if norms else ()):
        decays = [
            parameter
            for parameters, group in zip(held, settings, strict=True)
            if number(group.get("weight_decay")) and _differ_in_decay_alone(group, without)
            for parameter in parameters
        ]
        meant = all(dimensions.get(id(p), p.ndim) <= 1 and id(p) not in norms for p in held[place])
        decayed = [norms[id(parameter)] for parameter in decays if id(parameter) in norms]
        if number(without.get("weight_decay")) == 0.0 and meant and decayed:
            many = len(held[place])
            counted = f"{many} {'parameter' if many == 1 else 'parameters'}"
            holds = f"holds {counted}, none of them of a normalisation" if many else "is empty"
            message = (
                f"The weights of {len(decayed)} {'normalisation' if len(decayed) == 1 else 'normalisations'} decay "
                f"({listed(decayed, _SHOWN)}), although parameter group {place} has no weight decay. "
                f"That group {holds}."
            )
            remedy = (
                "If that is meant, do nothing. Else choose the group's parameters by parameter.ndim < 2, and not by "
                "names, which are others in each model."
            )
            return Breach("decay", "update-mismatch", "info", "weight decay", message, remedy, framework.step)
    return None


def _groups(framework: Framework) -> tuple[list[dict[str, Any]], list[list[Tensor]]]:
    """Return the optimizers' groups, and the model's own parameters in each; none where these are not known."""
    settings = [group for optimizer in framework.optimizers() for group in optimizer.param_groups]
    held = framework.parameter_groups() or []
    return (settings, held) if len(settings) == len(held) else ([], [])


def _differ_in_decay_alone(group: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        number(value) == number(other.get(name)) if number(value) is not None else value == other.get(name)
        for name, value in group.items()
        if name not in _DECAYS
    )


def _weights_of_norms(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, inner in model.named_modules():
        weight = inner._parameters.get("weight")
        if "Norm" in type(inner).__name__ and weight is not None and weight.requires_grad:
            yield f"{name}.weight".lstrip("."), weight


def _empty_rate(framework: Framework) -> Breach | None:
    settings, held = _groups(framework)
    rates = [number(group.get("initial_lr", group.get("lr"))) for group in settings]
    for place, rate in enumerate(rates):
        others = {other for other, parameters in zip(rates, held, strict=True) if parameters}
        if not held[place] and rate is not None and rate not in others:
            message = f"Parameter group {place} has a learning rate of its own, {rate:g}, and holds no parameter."
            remedy = "Look at how its parameters are chosen: those that are meant are in another group, or in none."
            where = f"parameter group {place}"
            return Breach("empty rate", "update-mismatch", "info", where, message, remedy, framework.step)
    return None


def _scaled_adapters(framework: Framework) -> Breach | None:
    configs: Any = getattr(framework.module, "peft_config", None)
    for name, inner in framework.module.named_modules() if isinstance(configs, Mapping) else ():
        scaling = getattr(inner, "scaling", None)
        for adapter, factor in scaling.items() if isinstance(scaling, Mapping) else ():
            meant = _scaling(configs.get(adapter), name)
            if meant is not None and number(factor) is not None and not math.isclose(factor, meant, rel_tol=1e-6):
                message = (
                    f"peft's configuration scales the adapter {adapter} of {name} by {meant:g} (alpha and r, with "
                    f"alpha_pattern and rank_pattern), and it is scaled by {factor:g}."
                )
                remedy = "Update peft, or give alpha and r without patterns; undo set_scale and scale_layer."
                return Breach("scaling", "update-mismatch", "warning", name, message, remedy, framework.step)
    return None


def _scaling(config: Any, module: str) -> float | None:
    """Return what a LoRA configuration of peft says of a module; None where a pattern is more than a name."""
    if str(getattr(config, "peft_type", "LORA")).rpartition(".")[2] != "LORA":  # AdaLoRA scales by alpha alone
        return None
    values = []
    for name, patterns in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")):
        own = getattr(config, patterns, None) or {}
        if not all(re.fullmatch(r"[\w.]+", pattern) for pattern in own):
            return None
        found = [value for pattern, value in own.items() if f".{module}".endswith(f".{pattern}")]
        values.append(number(found[0] if len(set(found)) == 1 else getattr(config, name, None)))
        if len(set(found)) > 1:
            return None
    alpha, rank = values
    if not alpha or not rank:
        return None
    return alpha / (math.sqrt(rank) if getattr(config, "use_rslora", False) else rank)


def _adapters_elsewhere(framework: Framework) -> Breach | None:
    configs: Any = getattr(framework.module, "peft_config", None)
    modules = dict(framework.module.named_modules()) if isinstance(configs, Mapping) else {}
    for adapter, config in configs.items() if modules else ():
        asked = getattr(config, "layers_to_transform", None)
        asked = [asked] if isinstance(asked, int) else asked
        if not asked or getattr(config, "layers_pattern", None):
            continue
        held = [name for name, inner in modules.items() if adapter in (getattr(inner, "lora_A", None) or ())]
        outside = [name for name in held if _layer_of(name, modules, max(asked)) not in (None, *asked)]
        if outside:
            message = (
                f"peft's configuration asks for adapters in layer{'s' * (len(asked) > 1)} {listed(asked, _SHOWN)} "
                f"alone (layers_to_transform), and {len(outside)} of {len(held)} are in others "
                f"({listed(outside, _SHOWN)})."
            )
            remedy = "Update peft, or name the modules in target_modules, with their layers."
            return Breach("elsewhere", "update-mismatch", "warning", outside[0], message, remedy, framework.step)
    return None


def _layer_of(name: str, modules: Mapping[str, nn.Module], largest: int) -> int | None:
    """Return the layer that a module is in: its place in the outermost list that has a place of that number."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        layers = modules.get(".".join(parts[:place]))
        if part.isdigit() and isinstance(layers, nn.ModuleList) and len(layers) > largest:
            return int(part)
    return None


def _rounded_frequencies(framework: Framework) -> Breach | None:
    low = {
        name: buffer.dtype
        for name, buffer in framework.module.named_buffers()
        if name.rpartition(".")[2] == "inv_freq" and buffer.dtype in (torch.bfloat16, torch.float16)
    }
    if not low:
        return None
    dtype = next(iter(low.values()))
    share = torch.finfo(dtype).eps / 2
    message = (
        f"Rotary frequencies are {str(dtype).removeprefix('torch.')} ({listed(list(low), _SHOWN)}): each is rounded by "
        f"up to {share:.1g} of itself, so that at place {_PLACE:,} an angle is off by up to {_PLACE * share:.1g}."
    )
    remedy = (
        "Cast parameters alone, or set the buffer to fp32 again behind model.to(dtype) and deepspeed.initialize; do so "
        "for a model that was trained with fp32 frequencies, and for long sequences."
    )
    return Breach("frequencies", "weights-mismatch", "info", "inv_freq", message, remedy, framework.step)


def _moment_that_stays(framework: Framework) -> Breach | None:
    own, bf16 = set(map(id, framework.parameters)), torch.bfloat16  # masters in bf16 are a configuration's wish
    for optimizer in framework.optimizers():
        for group in optimizer.param_groups if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else ():
            beta = number(group["betas"][1])
            low = any(one.dtype == bf16 and id(one) in own for one in group["params"])
            if low and beta is not None and 0.0 < 1.0 - beta < torch.finfo(bf16).eps / 4:  # half of the last bit
                message = (
                    f"{type(optimizer).__name__} keeps its second moment in bf16, as the weights are: {beta:g} times a "
                    "bf16 number is rounded back to it. So the moment rises and never falls, and a weight's updates "
                    "stay as small as its largest gradients made them."
                )
                remedy = (
                    "Do nothing if you know it. Else keep the weights in fp32 (autocast, DeepSpeed's bf16, FSDP2's "
                    "MixedPrecisionPolicy), or give a second beta of 0.99 or less."
                )
                return Breach("moment", "update-mismatch", "info", "bf16 moments", message, remedy, framework.step)
    return None


_LOOKS: tuple[Callable[[Framework], Breach | None], ...] = (
    _untied,
    _decayed_norms,
    _empty_rate,
    _scaled_adapters,
    _adapters_elsewhere,
    _rounded_frequencies,
    _moment_that_stays,
    vain_load,
    unlike_file,
)
