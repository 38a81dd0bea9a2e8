"""Check that what a script loads arrives: weights by their names, a file's bits, an optimizer's state.

* ``load_state_dict(strict=False)`` takes weights: a warning if the last one has found none of its names in the model.
* transformers' ``from_pretrained`` gives a model what its safetensors hold: a warning if its weights are others.
* A checkpoint of which the model takes all weights may hold the states of an optimizer and a scheduler, too: a note if
  one of them begins anew. So a resume forgets its moments or its learning rate, on every rank alike.

:func:`watch_loads` sees them, where a whole process is observed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule
from ds_silent.rules.schedules import schedulers_of, step_of

_SHOWN = 3

_vain_loads: WeakKeyDictionary[nn.Module, tuple[str, str, int]] = WeakKeyDictionary()
"""The modules whose last load took nothing: a name in the model, one in the file, and how many the file has."""
_unlike_files: WeakKeyDictionary[nn.Module, tuple[list[str], int]] = WeakKeyDictionary()
"""The models that ``from_pretrained`` gave other weights than their files hold: which, and of how many."""


def watch_loads(patches: Patches) -> None:
    """Remember which modules hold other weights than was asked for; scripts load before they are observed."""
    patches.wrap_method(nn.Module, "load_state_dict", _loads)
    original = torch.load
    torch.load = functools.wraps(original)(functools.partial(_reads, original))
    patches.also(lambda: setattr(torch, "load", original))
    patches.after_import("transformers.modeling_utils", functools.partial(_watch_pretrained, patches))


def _loads(original: Callable[..., Any], module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(module, state_dict, *args, **kwargs)
    _unlike_files.pop(module, None)
    _taken.pop(module, None)
    missing, unexpected = (getattr(result, name, ()) for name in ("missing_keys", "unexpected_keys"))
    with contextlib.suppress(Exception):  # whatever it was given
        if _checkpoints and not missing and (found := _source_of(state_dict)) is not None:
            _taken[module] = found
    if missing and unexpected and len(unexpected) == len(state_dict):
        _vain_loads[module] = missing[0], unexpected[0], len(unexpected)
    else:
        _vain_loads.pop(module, None)
    return result


def vain_load(framework: Framework) -> Breach | None:
    """Return the load that took nothing, if the model's last one was such."""
    found = next((vain for one in framework.module.modules() if (vain := _vain_loads.get(one)) is not None), None)
    if found is None:
        return None
    in_model, in_file, many = found
    message = (
        f"load_state_dict(strict=False) has loaded nothing: none of the {many} names that it was given is the model's "
        f"({in_file}, where the model has {in_model}). The training goes on from what the weights were before."
    )
    remedy = (
        "Take off the prefix that a wrapper has put before the names (module., _orig_mod., base_model.model.), or load "
        "into the module that was saved; read what load_state_dict returns."
    )
    return Breach("loaded nothing", "weights-mismatch", "warning", "load_state_dict", message, remedy, framework.step)


def _watch_pretrained(patches: Patches, transformers: ModuleType) -> None:
    kind = transformers.PreTrainedModel
    own = kind.__dict__["from_pretrained"]

    @functools.wraps(own.__func__)
    def from_pretrained(cls: type, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = own.__get__(None, cls)(path, *args, **kwargs)
        with contextlib.suppress(Exception):  # whatever its files are
            model = result[0] if isinstance(result, tuple) else result
            if not any(kwargs.get(name) for name in _OTHER_FILES) and getattr(model, "hf_quantizer", None) is None:
                found = _compared_with_files(model, _folder(path, kwargs))
                if found[0]:
                    _unlike_files[model] = found
        return result

    kind.from_pretrained = classmethod(from_pretrained)
    patches.also(lambda: setattr(kind, "from_pretrained", own))


_OTHER_FILES = ("state_dict", "variant", "subfolder", "gguf_file", "quantization_config")
"""Arguments with which the weights do not come from ``model*.safetensors`` as they are."""


def _folder(path: Any, kwargs: Mapping[str, Any]) -> Path:
    """Return where the files are: the directory itself, or the place of a hub's model in the cache."""
    if not Path(path).is_dir():
        where = {name: kwargs[name] for name in ("cache_dir", "revision") if kwargs.get(name)}
        path = Path(sys.modules["huggingface_hub"].try_to_load_from_cache(path, "config.json", **where)).parent
    return Path(path)


@torch.no_grad()
def _compared_with_files(model: nn.Module, folder: Path) -> tuple[list[str], int]:
    """Compare a row of each parameter with that of its name in the files; return which differ, and how many there are.

    A weight that was only dealt anew, as rotary weights are, has its norm still.
    """
    from safetensors import safe_open  # transformers has it

    held, many = dict(model.named_parameters()), 0
    unlike: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in held.keys() & opened.keys():
                stored, own = opened.get_slice(name), held[name]
                alike = tuple(stored.get_shape()) == own.shape and own.ndim and own.is_floating_point()
                if not alike or own.is_meta or not own.numel():
                    continue
                row, many = own.shape[0] // 2, many + 1
                if not torch.equal(stored[row : row + 1].to(own), own[row : row + 1]):
                    norms = [float(one.double().norm()) for one in (opened.get_tensor(name).to(own), own)]
                    unlike += [] if math.isclose(*norms, rel_tol=1e-9) else [name]
    return unlike, many


def unlike_file(framework: Framework) -> Breach | None:
    """Return the weights that ``from_pretrained`` has changed, if there are any."""
    all_found = [_unlike_files[one] for one in framework.module.modules() if one in _unlike_files]
    if not all_found:
        return None
    unlike, many = all_found[0]
    message = (
        f"from_pretrained gave the model other weights than its file holds: {len(unlike)} of {many} differ "
        f"({listed(sorted(unlike), _SHOWN)}). The training goes on from these."
    )
    remedy = (
        "Another release of transformers may load them right: 5.12.0 initialises the weights of a script's own class "
        "again. Or read the file and call load_state_dict behind from_pretrained."
    )
    return Breach("not as stored", "weights-mismatch", "warning", unlike[0], message, remedy, framework.step)


# -- the states beside the weights -------------------------------------------------------------------------------------

_checkpoints: dict[str, tuple[bool, dict[int, ref[Tensor]]]] = {}
"""Files that held the state of an optimizer: whether a scheduler's, too, and the tensors that were read with it."""
_taken: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()
"""The modules that hold the weights of such a file, all of them."""
_DEPTH, _ENTRIES = 3, 8  # of dictionaries in a checkpoint; of a list


def _reads(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(file, *args, **kwargs)
    with contextlib.suppress(Exception):  # whatever it holds
        inner = list(_dictionaries(result, _DEPTH))
        if any(one.get("state") and "param_groups" in one for one in inner):
            scheduled = any("_step_count" in one and (one.get("last_epoch") or 0) > 0 for one in inner)
            tensors = (value for one in inner for value in one.values() if isinstance(value, Tensor))
            name = getattr(file, "name", getattr(file, "path", file))  # of an open file
            _checkpoints[Path(str(name)).name] = scheduled, {id(one): ref(one) for one in tensors}
    return result


def _dictionaries(value: Any, depth: int) -> Iterator[Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        yield value
    held = value.values() if isinstance(value, Mapping) else value[:_ENTRIES] if isinstance(value, list) else ()
    for inner in held if depth else ():
        yield from _dictionaries(inner, depth - 1)


def _source_of(state_dict: Any) -> tuple[str, bool] | None:
    """Return the file that was read for it; tensors are known whatever their names."""
    values = [value for value in dict(state_dict).values() if isinstance(value, Tensor)]
    for name, (scheduled, tensors) in reversed(_checkpoints.items()):
        if any((held := tensors.get(id(one))) is not None and held() is one for one in values):
            return name, scheduled
    return None


class LostState(Rule):
    """Look, before the first step, for optimizers and schedulers that begin anew beside weights that do not.

    A resume takes all weights of the model; what takes a part of them is a fine-tuning.
    """

    def __init__(self, framework: Framework):
        self._framework = framework
        self._found: tuple[Breach, ...] | None = None

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at the optimizers before their first step."""
        for optimizer in self._framework.optimizers():
            patches.hook(optimizer.register_step_pre_hook, functools.partial(safely, self.look))

    def look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Compare once what the model has loaded with what its optimizers hold, as the first of these steps."""
        if self._found is not None:
            return
        self._found = ()
        wrapper, optimizers = self._framework.wrapper, self._framework.optimizers()
        wholes = [self._framework.module, *([wrapper] if isinstance(wrapper, nn.Module) else ())]
        taken = next((_taken[one] for one in wholes if one in _taken), None)
        if taken is None:
            return
        name, scheduled = taken
        if not any(one.state for one in optimizers):
            held = f"the state of an optimizer{' and of a learning-rate scheduler' * scheduled}"
            anew, loses = "optimizer", "moments begin at 0. A scheduler has a state of its own"
            meant = "from those weights alone"
        elif scheduled and (schedulers := schedulers_of(self._framework)) and not any(map(step_of, schedulers)):
            held = "the state of a learning-rate scheduler"
            anew, loses, meant = "scheduler", "learning rate begins anew", "with a schedule of its own"
        else:
            return
        message = f"The model has taken its weights from {name}, which also holds {held}, and the {anew} begins anew."
        remedy = (
            f"Do nothing if this run is to start {meant}. Else call the {anew}'s load_state_dict, too, before the "
            f"first step: its {loses}."
        )
        self._found = (Breach("lost state", "update-mismatch", "info", name, message, remedy, self._framework.step),)

    def breaches(self) -> tuple[Breach, ...]:
        return self._found or ()
