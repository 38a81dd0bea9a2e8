"""The start of an observation: all ranks agree on the block, and then on the sizes that follow from it and the model.

    config = agree_on_block(group, facts, words, config, refusal)  # None: nobody observes; raises on all ranks or none
    capture, unlike = agree_on_layout(group, facts, words, config, make)  # unlike: why nothing is to be observed

A block is refused where ranks differ, because somebody meant something else. A training whose ranks are unlike in what
would run without an observer - another number of micro-batches - goes on without one: its collectives would not meet.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_silent.capture.step import StepCapture
from ds_silent.config import BLOCK, WRITERS_ALONE, ConfigError, SilentConsistencyConfig, WriterError
from ds_silent.distributed.agreement import SHOWN_VALUES, Statement, Verdict, agree, flat
from ds_silent.distributed.parts import ranks_of
from ds_silent.exchange.collectives import largest
from ds_silent.exchange.layout import layout_of
from ds_silent.extras import VERSION, installed, missing_sentence
from ds_silent.framework import Framework
from ds_silent.records import Event
from ds_silent.text import Words

# ----------------------------------------------------------------------------------------------------------------------
# What no framework's training can have observed is refused with a sentence, the same on every rank.


EXACT_RANKS = 1024
"""Up to which all pairs of ranks are compared exactly. Every rank reduces the matrix of all pairs at every measurement:
4 MiB there, 32 times a sketch and as much as all else that is sent together; 64 MiB at 4,096 ranks, 1 GiB at 16,384."""


def refuse_too_few_ranks(config: SilentConsistencyConfig, ranks: int) -> None:
    """Raise :class:`ConfigError` where two ranks would have to outvote each other."""
    if config.respond.on_replica_drift == "majority" and ranks < 3:
        raise ConfigError(
            f'{BLOCK}.respond.on_replica_drift "majority" needs at least 3 ranks to outvote one, got {ranks}; use '
            '"mean" or "stop"'
        )


def refuse_unusable_directory(config: SilentConsistencyConfig) -> None:
    """Raise :class:`ConfigError` where ``output_dir`` cannot be written, as far as that shows before anything is made.

    That it is missing says nothing: where even its first part is, another machine may have it.
    """
    path = Path(config.output_dir)
    there = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
    why = ""
    if not there.is_dir():
        why = f"be a directory, because {str(there)!a} is a file"
    elif not os.access(there, os.W_OK | os.X_OK) and there.parent != there:
        why = f"be written, because this user may not create files in {str(there)!a}"
    if why:
        raise ConfigError(
            f"{BLOCK}.output_dir {config.output_dir!a} cannot {why}; choose a directory that rank 0 can create files in"
        )


def refuse_too_many_ranks(config: SilentConsistencyConfig, ranks: int) -> None:
    """Raise :class:`ConfigError` where the exact comparison would cost more than it can tell."""
    direction = config.direction
    checked = direction.method == "sketch" and direction.exact_interval > 0
    if ranks <= EXACT_RANKS or not (checked or direction.method == "exact"):
        return
    key, remedy = (
        ('method "exact"', 'use "sketch"')
        if direction.method == "exact"
        else (f"exact_interval {direction.exact_interval}", "set it to 0")
    )
    raise ConfigError(
        f"{BLOCK}.direction.{key} needs at most {EXACT_RANKS} ranks, got {ranks}: the matrix of all pairs would be "
        f"{4 * ranks * ranks / 1e6:,.0f} MB that every rank reduces at every measurement; {remedy}"
    )


def refuse_metrics_without_library(config: SilentConsistencyConfig) -> None:
    """Raise :class:`ConfigError` where metrics are to be served and prometheus_client is not there. Writing rank."""
    if config.metrics_port and not installed("prometheus_client"):
        what = f"{BLOCK}.metrics_port {config.metrics_port}"
        raise ConfigError(f"{missing_sentence(what, ['prometheus_client'], 'prometheus')} on the host of rank 0")


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Modules made with ``sparse=True`` (``torch.nn.Embedding``, ``EmbeddingBag``): some rows only have a gradient."""
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if getattr(module, "sparse", False) is True and any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"silent_consistency cannot observe {name or 'the model'} ({type(module).__name__} with sparse=True), "
                "because its gradient holds only some rows; make it with sparse=False, freeze it, or set "
                '"silent_consistency": {"enabled": false}'
            )


# ----------------------------------------------------------------------------------------------------------------------
# Where the records of a data-parallel group go: each has a directory of its own, where there are several.


Position = tuple[int, int]
"""(this rank's place, how many ranks)."""


def label_of(places: Mapping[str, Position]) -> str:
    """Of this rank's data-parallel group, from its place among the parts of the model; empty where there is one."""
    return "-".join(f"{name}{at}" for name, (at, of) in places.items() if of > 1)


def placed(config: SilentConsistencyConfig, label: str) -> SilentConsistencyConfig:
    """With that group's directory."""
    return config.model_copy(update={"output_dir": f"{config.output_dir}/{label}"}) if label else config


# -- The start of an observation ---------------------------------------------------------------------------------------


Facts = Callable[[], dict[str, Any]]
"""What the ranks' collectives follow from, by the names that a person would look for; JSON values."""
LIST_OF_TRAINABLE = "the list of trainable parameters"
_PARAMETER = "parameter "
_WRITERS_OWN = ("output_dir", "tensorboard")  # only the rank that writes looks at them


def alone() -> bool:
    """Whether there is nobody to agree with: a refusal need not wait for what the framework does itself."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    return os.environ.get("WORLD_SIZE", "1") == "1" and "OMPI_COMM_WORLD_SIZE" not in os.environ


def agree_on_block(
    group: dist.ProcessGroup | None,
    facts: Facts,
    words: Words,
    config: SilentConsistencyConfig | None,
    refusal: ConfigError | None,
) -> SilentConsistencyConfig | None:
    """This rank's block, when every rank of the group has the same one; None when nobody has.

    Args:
        group: the ranks that average their gradients; None where the framework has no such group.
        facts: asked for what their collectives follow from.
        words: the framework's.
        config: this rank's block; None without one.
        refusal: why this rank cannot honour its block.

    Raises:
        ConfigError: on every rank, with one sentence that says who has what.
    """
    present = config is not None or refusal is not None
    if group is None:
        if present:
            raise refusal or ConfigError(f"{BLOCK} cannot find the data-parallel group of this {words.training}")
        return None
    values = {} if config is None else _compared(facts, config)
    mine = Statement(
        present=present,
        absent="" if present else f'no {BLOCK} block, or "enabled": false',
        version=VERSION,
        refusal=None if refusal is None else str(refusal),
        writers=isinstance(refusal, WriterError),
        values=values,
    )
    verdict = agree(group, "block", mine, words)
    if verdict.sentence is not None:
        _refuse(verdict, group, refusal, f"give every rank the same {words.config} and the same version of ds_silent")
    return config


def agree_on_layout(
    group: dist.ProcessGroup,
    facts: Facts,
    words: Words,
    config: SilentConsistencyConfig,
    make: Callable[[], StepCapture],
) -> tuple[StepCapture, Event | None]:
    """The capture, and where the ranks are unlike in what they would send, the event that says so.

    Raises:
        ConfigError: on every rank, when one of them could not make its capture.
    """
    capture, refusal = None, None
    values = facts()
    try:
        capture = make()
        layout = asdict(layout_of(config, capture.shape))
        values |= {"layout": hashlib.sha256(repr(layout).encode()).hexdigest()[:8]}
    except ConfigError as error:
        refusal = error
    except Exception as error:  # our own bug: all ranks end with it, and none waits for this one
        refusal = ConfigError(f"{BLOCK} cannot observe this {words.training} ({type(error).__name__}: {error})")
        refusal.__cause__ = error
    mine = Statement(True, refusal=None if refusal is None else str(refusal), values=values, version=VERSION)
    verdict = agree(group, "layout", mine, words)
    if verdict.sentence is None:
        assert capture is not None
        return capture, None
    if capture is None or verdict.refused or verdict.missing:
        _refuse(verdict, group, refusal, f"give every rank the same model and {words.config}")
    assert capture is not None
    if LIST_OF_TRAINABLE in verdict.sentence:
        verdict = _by_parameter(verdict, group, dict(facts()), words, capture.framework)
    return capture, _unlike(verdict, capture.step)


def _by_parameter(
    verdict: Verdict, group: dist.ProcessGroup, values: dict[str, Any], words: Words, framework: Framework
) -> Verdict:
    """Ask again by parameters where their lists differ; return what was known where that names none.

    All ranks know that they differ, so all come.
    """
    values.pop(LIST_OF_TRAINABLE, None)
    values |= {f"{_PARAMETER}{name}": "frozen" for name, _ in framework.module.named_parameters()}
    for name, shape in zip(framework.names, framework.shapes, strict=True):
        values[f"{_PARAMETER}{name}"] = f"trainable, {'x'.join(map(str, shape))}"
    found = agree(group, "parameters", Statement(True, values=values, version=VERSION), words)
    if found.sentence is None or found.missing:
        return verdict
    first, *rest = f"; {found.sentence}".split(f"; {_PARAMETER}")
    more = [f"and {len(rest) - SHOWN_VALUES} more parameters differ"] if len(rest) > SHOWN_VALUES else []
    named = [first.removeprefix("; "), *(f"{_PARAMETER}{one}" for one in rest[:SHOWN_VALUES]), *more]
    return replace(found, sentence="; ".join(part for part in named if part))


def first_step(capture: StepCapture) -> int:
    """The step of rank 0, whatever this rank counts. A collective."""
    mine = capture.step if dist.get_rank(capture.group) == 0 else 0
    return largest(mine, capture.group, capture.device)


def tells(error: BaseException, default: bool) -> bool:
    """Whether this rank says the refusal to the user: one does, and where nothing was agreed, ``default`` decides."""
    return bool(getattr(error, "teller", default))


def _refuse(verdict: Verdict, group: dist.ProcessGroup, mine: ConfigError | None, remedy: str) -> None:
    if mine is not None and str(mine) == verdict.sentence:
        error = mine  # all ranks refuse alike
    elif verdict.missing or verdict.agreed:
        error = ConfigError(str(verdict.sentence))
    else:
        error = ConfigError(f"the ranks do not agree on {BLOCK}, so none of them starts: {verdict.sentence}; {remedy}")
    error.teller = verdict.teller == dist.get_rank(group)  # type: ignore[attr-defined]
    raise error


def _unlike(verdict: Verdict, step: int) -> Event:
    named = f" ({ranks_of(verdict.odd)} unlike the others)" if verdict.odd else ""
    message = f"Nothing is observed, because the ranks would not send the same{named}: {verdict.sentence}."
    remedy = "The training goes on as it is without ds_silent; start every rank with the same model and configuration."
    return Event(step, "observer-off", "error", verdict.odd, "start", None, None, message, remedy)


def _compared(facts: Facts, config: SilentConsistencyConfig) -> dict[str, Any]:
    """What all ranks must have alike, by dotted names."""
    values = flat(config.model_dump(mode="json"), f"{BLOCK}.")
    for name in WRITERS_ALONE:
        del values[f"{BLOCK}.{name}"]
    if "stop" not in (
        config.respond.on_aggregation_error,
        config.respond.on_failed_retry,
        config.respond.on_replica_drift,
    ):
        for name in _WRITERS_OWN:  # else every rank writes its part of a suspect checkpoint there
            del values[f"{BLOCK}.{name}"]
    if config.reduction == "ordered":  # the training's own arithmetic, which cannot be left out
        values |= facts()
    return values
