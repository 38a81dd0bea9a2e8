"""Attach an observer to a training of any framework: agree, open and compare before the first step.

    observer = observe(subject, config, refusal)     # every rank; None: nobody observes
    observer_of(subject.held)                        # the same one, later

A refusal reaches every rank, whichever rank it comes from: before anything communicates, all ranks agree on the block
and then on what follows from it and the model (:mod:`ds_silent.distributed.agreement`). What only rank 0 can know (is
the output directory writable, does it hold records?) is agreed with one small all-reduce.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_silent.alerts.sink import refuse_unusable_alerts
from ds_silent.capture.data_set import rows_held_by
from ds_silent.capture.deals import deal_item, deal_of, dealt_by_all
from ds_silent.capture.loaders import data_facts
from ds_silent.capture.step import StepCapture
from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, WriterError, parse
from ds_silent.config.block_file import load_ds_config, name_of
from ds_silent.distributed.parts import listed
from ds_silent.distributed.places import SHOWN_HOSTS, PlaceBoard, Places, read_groups
from ds_silent.exchange import layout
from ds_silent.exchange.collectives import let_gloo_end_first
from ds_silent.extras import is_first, print_without_traceback
from ds_silent.framework import Framework
from ds_silent.maths.fingerprint import Hash
from ds_silent.observing import start
from ds_silent.observing.observer import IdleObserver, Observer
from ds_silent.observing.records_directory import RunDirectory
from ds_silent.observing.start import refuse_metrics_without_library, refuse_too_many_ranks
from ds_silent.preflight.comparison import compare
from ds_silent.preflight.inventory import Training, local_items, sampler_facts
from ds_silent.preflight.messages import events_of, table
from ds_silent.preflight.messages import to_json as preflight_json
from ds_silent.records import Event, declared, to_json
from ds_silent.replicas.compare import batch_statistics_of
from ds_silent.respond.stop import end_by_event
from ds_silent.rules.settings_in_force import settings_in_force
from ds_silent.sinks import SinkError
from ds_silent.sinks.run_directory import process_of, run_text
from ds_silent.sinks.scalars import MonitorWrite
from ds_silent.text import Words, shown

logger = logging.getLogger("ds_silent")
_ATTRIBUTE = "_ds_silent_observer"
_observed: list[str] = []  # trainings of this process, for who ran a script to have one observed


Given = SilentConsistencyConfig | Mapping[str, Any] | str | Path | None
"""What a script may give as ``config``, see :func:`given_block`."""


@dataclass(frozen=True)
class Subject:
    """Describe a training that may be observed, as its framework does while nothing is hooked."""

    held: Any  # what a script holds, such as a wrapped module: the observer is found by it
    words: Words
    group: dist.ProcessGroup | None  # the ranks that reduce their gradients together; None where there is no such group
    facts: start.Facts  # what their collectives follow from
    refuse: Callable[[SilentConsistencyConfig], None]  # raises ConfigError for what cannot be observed
    framework: Callable[[SilentConsistencyConfig], Framework]  # makes it; a collective of the group
    training: Callable[[], Training]  # for the preflight
    loader: Any = None  # the training's, or its sampler, where it is known before it feeds the training
    before: Hash | None = None  # of the weights before the framework broadcast rank 0's
    monitor_write: MonitorWrite | None = None  # of the framework's own monitor


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """End the process with one sentence where a refusal is not caught; one rank prints it."""
    try:
        yield
    except (ConfigError, SinkError):
        print_without_traceback(ConfigError, SinkError, tells=partial(start.tells, default=is_first()))
        raise


def observe(
    subject: Subject, config: SilentConsistencyConfig | None, refusal: ConfigError | None = None
) -> Observer | None:
    """Return the observer of a training. All ranks agree on the block, refusals, the output directory, the preflight.

    Args:
        config: None where this rank has no block; then all have none, or all refuse.
        refusal: why this rank cannot honour its block.

    Raises:
        ConfigError: the block, or what it stands beside, cannot be honoured; the same on every rank.
        SinkError: rank 0 cannot write to ``output_dir``; raised on every rank.
    """
    if config is not None and refusal is None:
        refusal = _refusal_of(subject, config)
    group, words = subject.group, subject.words
    config = start.agree_on_block(group, subject.facts, words, config, refusal)
    if config is None:
        return None
    assert group is not None  # all have agreed in it
    board = PlaceBoard(group)
    board.leave(process_of(os.getpid()))
    capture, unlike = start.agree_on_layout(group, subject.facts, words, config, lambda: _capture_of(subject, config))
    places = _places_of(board, config) if dist.get_rank(group) == 0 else None  # all have left theirs before they agreed
    if capture.device.type == "cpu":
        let_gloo_end_first()  # after the observer has closed: what is registered first is called last
    home = RunDirectory.open(config, capture.group, capture.device, subject.monitor_write)
    home.processes = board.processes
    board.forget()  # rank 0 has read them before it opened the directory, for which all have waited
    observer = Observer(capture, config, home, start.first_step(capture))
    if home.sinks is not None and places is not None:
        observer.place(places)
    _keep(subject, observer)
    if home.sinks is not None:
        _announce(subject, config, capture, home)
    _follow_rows(subject, capture, observer)
    if config.preflight:
        _compare_before_training(subject, config, capture, observer, home)
    if unlike is not None:
        _stand_down(observer, unlike, config, writes=home.sinks is not None)
    return observer


def given_block(config: Given, called: str = "config") -> SilentConsistencyConfig | None:
    """Read what a script gives as ``config``: a parsed block, a block, or a dict or file that holds one under its name.

    Args:
        called: what a user calls it, for the sentences about a mistake.

    Returns:
        None where it is switched off; the defaults where nothing is given.

    Raises:
        ConfigError: it cannot be honoured, or the file cannot be read.
    """
    if isinstance(config, SilentConsistencyConfig):
        return config
    held = {} if config is None else load_ds_config(config, called)
    return parse(held if BLOCK in held else {BLOCK: held}, name_of(config, called))


def idle_observer(config: Given) -> Observer | None:
    """Return an observer for a script that runs as one process: it does nothing, and one sentence says why.

    Raises:
        ConfigError: the block is wrong, see :func:`given_block`.
    """
    with told_in_a_sentence():
        block = given_block(config)
    if block is None:
        return None
    say_alone("your launcher with two processes or more")
    _observed.append("training")  # it is said already why nothing is observed
    return IdleObserver(block.output_dir)


def say_alone(launchers: str) -> None:
    """Log why a training that one process runs is not observed."""
    logger.warning(
        "ds_silent: one process trains this model, so there is nothing to compare and nothing is observed; start it "
        "with %s",
        launchers,
    )


def anything_observed() -> bool:
    """Tell whether a training of this process has had an observer."""
    return bool(_observed)


def observer_of(held: Any) -> Observer | None:
    """The observer of what a script holds, or None when it has none (no block, disabled, no optimizer, or closed)."""
    observer: Observer | None = held.__dict__.get(_ATTRIBUTE)
    return None if observer is None or observer.closed else observer


def _capture_of(subject: Subject, config: SilentConsistencyConfig) -> StepCapture:
    return StepCapture(subject.framework(config), config, layout.GATHER_LIMIT)


def _refusal_of(subject: Subject, config: SilentConsistencyConfig) -> ConfigError | None:
    try:
        if observer_of(subject.held) is not None:
            raise ConfigError(
                f"this {subject.words.training} is already observed; close its observer (ds_silent.observer_of) first"
            )
        subject.refuse(config)
        if subject.group is not None:
            refuse_too_many_ranks(config, dist.get_world_size(subject.group))
    except ConfigError as error:
        return error
    try:
        if subject.group is not None and dist.get_rank(subject.group) == 0:
            read_groups(config.places)
            refuse_unusable_alerts(config.alerts)
            refuse_metrics_without_library(config)
    except ConfigError as error:
        return WriterError(str(error))
    return None


def _places_of(board: PlaceBoard, config: SilentConsistencyConfig) -> Places:
    """Return where all ranks run; on the rank that writes."""
    try:
        groups = read_groups(config.places)
    except ConfigError as error:  # it could be read a moment ago
        logger.warning("ds_silent: %s", error)
        groups = {}
    places = Places(board.read(), groups)
    if places.without_group:
        lacking = listed([shown(host) for host in places.without_group], SHOWN_HOSTS, "hosts")
        logger.warning("ds_silent: %s.places %s does not name %s", BLOCK, shown(config.places), lacking)
    return places


def _keep(subject: Subject, observer: Observer) -> None:
    """Attach the observer to what the script holds, until it closes; at the latest at the end of the process."""
    subject.held.__dict__[_ATTRIBUTE] = observer
    # a model that is trained no more is freed: Megatron's optimizer reaches it in ways that Python cannot follow
    observer.closing = partial(subject.held.__dict__.pop, _ATTRIBUTE, None)
    _observed.append(subject.words.training)
    _close_at_exit(observer)


def _announce(subject: Subject, config: SilentConsistencyConfig, capture: StepCapture, home: RunDirectory) -> None:
    """Say on the console that this is observed, and write ``run.json``; on the writing rank."""
    ranks, framework = capture.shape.ranks, capture.framework
    steps = "every step" if config.interval == 1 else f"every {config.interval} steps"
    # a warning, because a block that is silently not read is the commonest mistake and info is rarely shown
    whom = f"{ranks} ranks" if ranks > 1 else "1 rank, which there is nothing to compare with"
    logger.warning("ds_silent: observing %s, %s; records in %s", whom, steps, home.says())
    try:
        parameters, _ = framework.replicated()
        arithmetic = framework.arithmetic(sum(framework.numels), 1)
        training = {
            **subject.facts(),
            "micro-batches of a step": framework.micro_batches,
            "the dtype of the reduction": str(arithmetic.communication).removeprefix("torch."),
        }
        observed = {"applied gradient": framework.observes_applied, "replicas": bool(parameters)}
        if batch_statistics_of(framework.module):
            observed["running statistics"] = False
        text = run_text(
            config, subject.words.framework, ranks, training, observed, settings_in_force(capture.framework)
        )
    except Exception as error:  # the records can be read without it
        logger.debug("ds_silent: run.json is not written: %s: %s", type(error).__name__, error)
        return
    home.write_file("run.json", text)


def _follow_rows(subject: Subject, capture: StepCapture, observer: Observer) -> None:
    capture.loaders.given = subject.loader
    known = data_facts(subject.loader, capture.shape.ranks)
    observer.samples_per_epoch, observer.shuffles = known.rows, known.shuffles


def _compare_before_training(
    subject: Subject, config: SilentConsistencyConfig, capture: StepCapture, observer: Observer, home: RunDirectory
) -> None:
    """Compare what the ranks have before the first step, and publish it. A collective."""
    ranks = capture.shape.ranks
    deal = deal_of(subject.loader, ranks)
    facts = sampler_facts(subject.loader)
    if facts is not None and facts.world_size == 1 < ranks and not facts.picked:  # of rows that were split before?
        rows = rows_held_by(getattr(subject.loader, "dataset", getattr(subject.loader, "_dataset", None)))
        facts = replace(facts, picked=f"all rows of a data set [{rows:.0f}]" if rows else "")
    items = local_items(subject.training(), facts, subject.before, ranks)
    outcome = compare([*items, deal_item(deal)], capture.group, capture.device)
    capture.settings_check.told_before(outcome)
    if home.sinks is None:
        return
    data = declared(config.detectors.dealt) or dealt_by_all(outcome, deal)
    from rich.console import Console  # not at the top: rich comes behind ds_silent.text, which keeps the generator

    console = Console(stderr=True)  # colours on a terminal only, and none with NO_COLOR
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log has no edge
    console.print(table(outcome))
    console.print(f"data: {data.sentence}", markup=False, highlight=False)
    written = preflight_json(outcome) | {"data": to_json(data)}
    home.write_file("preflight.json", json.dumps(written, indent=1) + "\n")
    for event in events_of(outcome):
        observer.report(event)


def _stand_down(observer: Observer, unlike: Event, config: SilentConsistencyConfig, writes: bool) -> None:
    """Observe nothing, because the ranks would not send the same; every rank gets here."""
    observer.stand_down(unlike)
    if config.detectors.stop_on != "never":
        observer.close()
        raise end_by_event(unlike if writes else None, config.detectors.stop_on)


def _close_at_exit(observer: Observer) -> None:
    """Close the observer when the script just ends: the last step's record is still under way then."""
    reference = weakref.ref(observer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close(getattr(sys, "last_value", None))  # what nobody caught

    atexit.register(close)
