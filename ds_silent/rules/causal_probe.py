"""Probe the first training forward of a causal language model: what it may not see must not change its logits.

Before it takes place, the forward is run without gradient, with the very arguments and in the mode of the training:
twice as it is, for the noise of its own, and then with other tokens

* behind a position: what stands before it must not move;
* in the documents before the last one of a packed row, where ``position_ids`` say that there are several;
* where ``attention_mask`` says padding, to the left of a row's text.

Random numbers, buffers and attributes of the modules are put back before each forward and behind the last. A place has
moved when the root mean square of its logits' change is more than ``BOUND`` of their spread, the standard deviation
over the vocabulary, and more than ``TIMES_NOISE`` times what the repetition alone has moved; a probe fails where half
of the rows or more have such a place. Where a fused loss makes no logits, hidden states are compared in their stead.
Rounding may move a place by itself only where the grouping of tokens changes, as between experts. What a probe would
need and does not have is said in one sentence, and nothing is run.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent import device
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.language_models import causal_model, inputs_of, is_compiled
from ds_silent.rules.rule import Breach, Rule

logger = logging.getLogger("ds_silent")
BOUND = {True: 1e-4, False: 0.02}  # of the spread; in fp32, and in what is narrower
TIMES_NOISE = 8.0
_NOISY = 0.1  # of the spread: such a forward says nothing
_ROWS = 8  # whose logits are compared
_CUT = 16  # tokens before the changed ones: a leaking token weighs the more, the fewer there are
_AWAY = (0, 1, 3, 7)  # places that are compared, counted from the nearest to what is changed
_STRANGE = ("past_key_values", "inputs_embeds", "encoder_hidden_states", "pixel_values", "token_type_ids")


@dataclass(frozen=True)
class _Trial:
    """Change some tokens, and watch some places."""

    name: str
    ids: Tensor  # (rows, length), some of them changed
    rows: Tensor  # (rows, 1)
    columns: Tensor  # (rows, places) that may not move
    valid: Tensor  # (rows, places): the place holds a token that stays, in a row that is changed


class CausalProbe(Rule):
    """Run the probe once; see the module docstring."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._found: tuple[Breach, ...] = ()
        self._done = False

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Hook the model, or decline."""
        self._model = causal_model(self._framework.module)
        if self._model is None:
            _decline("it needs one causal language model of transformers, whose loss and attention modules all say so")
        elif not self._framework.forwards_alone or any(map(_is_meshed, self._framework.module.parameters())):
            _decline("other ranks take part in each forward")
        else:
            patches.hook(self._model.register_forward_pre_hook, partial(safely, self._hook), with_kwargs=True)

    def _hook(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._done and not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._done = True
            self._probe(model, args, kwargs)

    def _probe(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = inputs_of(model, args, kwargs)
        why = _refusal(self._framework.module, inputs)
        trials = [] if why else list(_trials(inputs))
        if why or not trials:
            _decline(why or "its rows are too short")
            return
        with _put_back(model) as again, torch.no_grad(), _hidden_states(model) as hidden:

            def places(ids: Tensor, of: list[_Trial]) -> list[Tensor]:
                again()
                output = getattr(model.forward(**{**inputs, "input_ids": ids}), "logits", None)
                for one in (output, *hidden):
                    if isinstance(one, Tensor) and one.shape[:2] == ids.shape:
                        hidden.clear()
                        return [one[trial.rows, trial.columns].float() for trial in of]
                raise NothingToCompare

            try:
                before = places(inputs["input_ids"], trials)
                again_so = places(inputs["input_ids"], trials)
                noise = torch.stack([_moves(*both).max() for both in zip(before, again_so, trials, strict=True)]).max()
                moved = [_moves(b, places(t.ids, [t])[0], t) for b, t in zip(before, trials, strict=True)]
            except NothingToCompare:
                _decline("the forward shows neither logits nor hidden states of every place")
                return
        if not float(noise) <= _NOISY:  # or NaN
            _decline("the forward returns other logits, or none that are finite, when it is repeated")
            return
        self._judge(trials, moved, max(BOUND[_in_fp32(model)], TIMES_NOISE * float(noise)))

    def _judge(self, trials: list[_Trial], moved: list[Tensor], bound: float) -> None:
        """``moved``: of each row, the farthest."""
        self._found = tuple(
            _breach(trial.name, float(by.median()), self._framework.step)
            for trial, by in zip(trials, moved, strict=True)
            if float((by > bound).float().mean()) >= 0.5
        )
        if not self._found:
            said = ", ".join(_WHAT[trial.name] for trial in trials)
            logger.info("ds_silent: probe: nothing moved with other tokens %s", said)

    def breaches(self) -> tuple[Breach, ...]:
        """Return what the probe has found, for the whole run: it is not repeated."""
        return self._found


class NothingToCompare(Exception):
    """Raise where a forward does not return what is compared."""


def _decline(why: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("ds_silent: probe: not probed: %s", why)


def _is_meshed(parameter: Tensor) -> bool:
    return hasattr(parameter, "device_mesh")


def _refusal(module: nn.Module, inputs: dict[str, Any]) -> str:
    """Return why this forward cannot be probed; empty where it can."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    strange = [name for name in _STRANGE if inputs.get(name) is not None]
    if strange:
        return f"the forward is given {strange[0]}"
    if is_compiled(module):
        return "the model is compiled, and would be compiled anew"
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return "the forward is given no input_ids of rows"
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
        return "attention_mask is not as long as input_ids"
    return ""


# -- what is changed, and what is watched ------------------------------------------------------------------------------


def _trials(inputs: dict[str, Any]) -> Iterator[_Trial]:
    """Yield those for which there are tokens; the host waits for the device here, once per run."""
    ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    plain = isinstance(mask, Tensor) and mask.ndim == 2
    attended = mask.ne(0) if mask is not None and plain else torch.ones_like(ids, dtype=torch.bool)
    columns = torch.arange(ids.shape[1], device=ids.device)
    first = attended.to(torch.int8).argmax(1, keepdim=True)
    length = attended.sum(1, keepdim=True)
    away = torch.tensor(_AWAY, device=ids.device)

    cut = first + (length // 2).clamp(max=_CUT)
    yield from _trial("later", ids, (columns >= cut) & attended, cut - 1 - away, attended)
    if isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == ids.shape[1]:
        between = attended[:, 1:] & attended[:, :-1]
        restarts = nn.functional.pad((positions[:, 1:] == 0) & (positions[:, :-1] > 0) & between, (1, 0))
        last = torch.where(restarts, columns, 0).amax(1, keepdim=True)  # 0: one document
        yield from _trial("document", ids, (columns < last) & attended, last + away, attended & (last > 0))
    if plain:
        yield from _trial("padding", ids, (columns < first) & (length > 0), first + away, attended & (first > 0))


def _trial(name: str, ids: Tensor, region: Tensor, watched: Tensor, attended: Tensor) -> Iterator[_Trial]:
    """Yield a trial, if there is a token to change in the rows of a place to watch."""
    changed = ids.clone()
    changed[region] = _others(ids[region], ids[attended] if bool(attended.any()) else ids.flatten())
    columns = watched.clamp(0, ids.shape[1] - 1)  # a place that is watched twice counts once
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    valid = attended[rows, columns] & ~region[rows, columns] & (changed != ids).any(1, keepdim=True)
    kept = valid.any(1).nonzero()[:_ROWS, 0]
    if len(kept):
        yield _Trial(name, changed, rows[kept], columns[kept], valid[kept])


def _others(tokens: Tensor, source: Tensor) -> Tensor:
    """Return other tokens of the batch, as unlike the given ones as a few tries make them."""
    places = torch.arange(len(tokens), device=tokens.device)
    tries = [source[(places + len(source) * part // 7 + 1) % len(source)] for part in range(7)]
    return max(tries, key=lambda one: int((one != tokens).sum()))


def _moves(before: Tensor, after: Tensor, trial: _Trial) -> Tensor:
    """(rows,): how far each row's farthest place has moved, as a share of its spread."""
    spread = before.std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    moved = (after - before).square().mean(-1).sqrt() / spread
    return torch.where(trial.valid, moved, 0.0).amax(1)


def _in_fp32(model: nn.Module) -> bool:
    """Tell whether the forward computes in fp32: its parameters are, and nothing casts them."""
    parameters = list(model.parameters())
    casts = torch.is_autocast_enabled(parameters[0].device.type)
    return not casts and all(one.dtype == torch.float32 for one in parameters)


@contextmanager
def _hidden_states(model: nn.Module) -> Iterator[list[Any]]:
    """Give a list of what the model below the head returns: a fused loss makes no logits."""
    found: list[Any] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found[:] = [getattr(output, "last_hidden_state", None)]

    inner: Any = model.base_model
    handle = inner.register_forward_hook(keep) if inner is not model else None
    try:
        yield found
    finally:
        if handle is not None:
            handle.remove()


# -- everything as it was ----------------------------------------------------------------------------------------------


@contextmanager
def _put_back(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give a function that puts back random numbers, buffers and attributes of the modules; at the end it is called."""
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    numbers = _random_states()
    cached = torch.is_autocast_cache_enabled()

    def again() -> None:
        for module, own, buffers in attributes:
            for kept, now in ((own, vars(module)), (buffers, module._buffers)):
                for name in now.keys() - kept.keys():
                    del now[name]
                now.update(kept)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for put, state in numbers:
            put(state)

    torch.set_autocast_cache_enabled(False)  # what a torch casts without gradient, the training must not find
    try:
        yield again
    finally:
        again()
        torch.set_autocast_cache_enabled(cached)


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (device.set_generator_state, device.generator_state()),
        (random.setstate, random.getstate()),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


# -- words -------------------------------------------------------------------------------------------------------------

_WHAT = {"later": "behind them", "document": "in another document of their row", "padding": "in padding"}
_WORDS: dict[str, tuple[Severity, str, str]] = {
    "later": (
        "error",
        "The logits at a place change with the tokens behind it, in a model that calls itself causal: it sees what it "
        "is to predict, so its loss says nothing.",
        "Look at what makes the attention mask: attn_implementation, a mask by hand, a patch of the attention.",
    ),
    "document": (
        "warning",
        "The logits in a packed row's last document change with the tokens of the documents before it, though "
        "position_ids start again: the documents are not separate.",
        "Leave attention_mask out and set use_cache to false, so that transformers sees the documents in position_ids; "
        "or give a mask by documents.",
    ),
    "padding": (
        "error",
        "The logits of a row change with the tokens that attention_mask calls padding: the model attends to padding.",
        "Look at what becomes of attention_mask on the way to the attention.",
    ),
}


def _breach(name: str, by: float, step: int) -> Breach:
    severity, message, remedy = _WORDS[name]
    message += f" The probe's first forward with other tokens {_WHAT[name]} moved them by {by:.2g} of their spread."
    return Breach(f"probe:{name}", "batch-suspect", severity, "attention", message, remedy, step)
