"""Checkpoints through DeepSpeed that are either whole or not there, and a resume that continues with the same bits.

    save(engine, directory, step, client_state, facts, ranks)
    tag = agreed(ranks, lambda: check(directory, facts, ranks))      # before anything is loaded
    client_state = load(engine, directory, tag, ranks)

``latest`` is replaced in one step after every rank's files are written and their check sums noted, so a run that dies
while it saves leaves the checkpoint before. What lies in a checkpoint: DeepSpeed's model, optimizer and scheduler
state; the client state (steps, sampler, observer: the same on every rank, because DeepSpeed keeps rank 0's only);
each rank's random generators; the facts of the run that a resumed one must share. All ranks must see one directory.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_silent.device import generator_state, set_generator_state
from finetune.lost import lost_peers
from finetune.ranks import Ranks
from finetune.settings import UserError

LATEST = "latest"
FACTS = "run.json"
Facts = Mapping[str, int | str | bool]


def save(engine: Any, directory: Path, step: int, client_state: dict[str, Any], facts: Facts, ranks: Ranks) -> None:
    """Writes ``directory/step-<step>`` and points ``latest`` to it. A collective.

    Raises:
        UserError: on the rank that could not write; ``latest`` then still names the checkpoint before.
    """
    try:
        _save(engine, directory, f"step-{step}", client_state, facts, ranks)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        if lost_peers(error) is not None:  # nothing is wrong with the disk
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"rank {ranks.rank} could not finish checkpoint step-{step} in {directory} ({reason}): see to space and "
            "rights there, the checkpoint before is untouched"
        ) from error


def _save(engine: Any, directory: Path, tag: str, client_state: dict[str, Any], facts: Facts, ranks: Ranks) -> None:
    folder = directory / tag
    engine.save_checkpoint(str(directory), tag=tag, client_state=client_state, save_latest=False)
    torch.save(_random_state(), folder / f"random_rank{ranks.rank}.pt")
    if ranks.is_first:
        _write_atomically(folder / FACTS, json.dumps(dict(facts), indent=1))
    dist.barrier()
    sums = {name: _check_sum(folder / name) for name in _files(folder)[ranks.rank :: ranks.world_size]}
    _write_atomically(
        folder / f"sums_rank{ranks.rank}.json", json.dumps({"world_size": ranks.world_size, "sums": sums})
    )
    dist.barrier()
    if ranks.is_first:
        _write_atomically(directory / LATEST, tag)
    dist.barrier()


def check(directory: Path, facts: Facts, ranks: Ranks) -> str:
    """The latest tag, when its files are whole and this run is the one that it belongs to. No collective.

    Each rank reads its share of the files, so call it where all ranks then agree.

    Raises:
        UserError: there is no checkpoint, one of its files is missing or damaged, or a fact differs.
    """
    latest = directory / LATEST
    if not latest.is_file():
        raise UserError(f"--resume found no checkpoint in {directory}: leave --resume out to start anew")
    tag = latest.read_text(encoding="utf-8").strip()
    folder = directory / tag
    if not tag or Path(tag).name != tag or not folder.is_dir():
        raise UserError(
            f"{latest} names {tag[:80]!r}, which is not a checkpoint in {directory}: write the name of one there"
        )
    remedy = f"write an earlier checkpoint's name into {latest}, or start anew"
    _check_facts(_read_json(folder / FACTS, remedy), facts, folder)
    names = sorted(path.name for path in folder.glob("sums_rank*.json"))
    noted: dict[str, int] = {}
    for name in names:
        noted.update(_read_json(folder / name, remedy).get("sums", {}))
    if len(names) != ranks.world_size:
        raise UserError(
            f"checkpoint {folder} holds check sums of {len(names)} ranks instead of {ranks.world_size}: {remedy}"
        )
    for name in sorted(noted)[ranks.rank :: ranks.world_size]:
        path = folder / name
        if not path.is_file():
            raise UserError(f"checkpoint {folder} lacks its file {name}: {remedy}")
        if _check_sum(path) != noted[name]:
            raise UserError(
                f"checkpoint file {path} is damaged (its check sum is not the one it was written with): {remedy}"
            )
    return tag


def load(engine: Any, directory: Path, tag: str, ranks: Ranks) -> dict[str, Any]:
    """Puts engine and random generators where :func:`save` found them; returns the client state. A collective."""
    try:
        path, client_state = engine.load_checkpoint(str(directory), tag=tag)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"checkpoint {directory / tag} does not fit this model or config ({reason}): start anew"
        ) from error
    if path is None:
        raise UserError(f"DeepSpeed found nothing to load in {directory / tag}: start anew without --resume")
    _restore_random_state(torch.load(directory / tag / f"random_rank{ranks.rank}.pt", weights_only=True))
    state: dict[str, Any] = client_state
    return state


def _check_facts(written: Mapping[str, Any], facts: Facts, folder: Path) -> None:
    for name, value in facts.items():
        if written.get(name) != value:
            raise UserError(
                f"checkpoint {folder} was made with {name} {written.get(name)!r}, this run has {value!r}: "
                "resume with the first run's value, or start anew in another --output"
            )


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint file {path} is missing or damaged: {remedy}") from error
    return content if isinstance(content, dict) else {}


def _files(folder: Path) -> list[str]:
    """Names below ``folder``, sorted, without the check sums themselves."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith("sums_rank"))


def _check_sum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _random_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "device": generator_state(),
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    set_generator_state(state["device"])
