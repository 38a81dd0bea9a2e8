"""Checkpoints of the Trainer that are either whole or not there.

    seal(folder, facts, ranks)                       # after the Trainer has written it
    folder = agreed(ranks, lambda: check(directory, facts, ranks))      # before anything is loaded

``latest`` is replaced in one step after every rank's files are written and their check sums noted, so a run that dies
while it saves leaves the checkpoint before. The Trainer names no such file and would take the newest folder, whole or
not. ``facts.json`` holds the facts that a resumed run must share. All ranks must see one directory.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from finetune.ranks import Ranks
from finetune.settings import UserError

LATEST = "latest"
FACTS = "facts.json"
Facts = Mapping[str, int | str | bool]


def seal(folder: Path, facts: Facts, ranks: Ranks) -> None:
    """Note what is in the checkpoint ``folder``, and point ``latest`` beside it to it. A collective."""
    if ranks.is_first:
        _write_atomically(folder / FACTS, json.dumps(dict(facts), indent=1))
    dist.barrier()
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in files if not name.startswith("sums_rank"))
    sums = {name: _check_sum(folder / name) for name in names[ranks.rank :: ranks.world_size]}
    _write_atomically(folder / f"sums_rank{ranks.rank}.json", json.dumps({"sums": sums}))
    dist.barrier()
    if ranks.is_first:
        _write_atomically(folder.with_name(LATEST), folder.name)
    dist.barrier()


def check(directory: Path, facts: Facts, ranks: Ranks) -> Path:
    """The latest checkpoint, when its files are whole and this run is the one that it belongs to. No collective.

    Each rank reads its share of the files, so call it where all ranks then agree.

    Raises:
        UserError: there is no checkpoint, one of its files is missing or damaged, or a fact differs.
    """
    latest = directory / LATEST
    if not latest.is_file():
        raise UserError(f"--resume found no checkpoint in {directory}: leave --resume out to start anew")
    name = latest.read_text(encoding="utf-8").strip()
    folder = directory / name
    if not name or Path(name).name != name or not folder.is_dir():
        raise UserError(
            f"{latest} names {name[:80]!r}, which is not a checkpoint in {directory}: write the name of one there"
        )
    remedy = f"write an earlier checkpoint's name into {latest}, or start anew"
    written = _read_json(folder / FACTS, remedy)
    for fact, value in facts.items():
        if written.get(fact) != value:
            raise UserError(
                f"checkpoint {folder} was made with {fact} {written.get(fact)!r}, this run has {value!r}: "
                "resume with the first run's value, or start anew in another --output"
            )
    files = sorted(folder.glob("sums_rank*.json"))
    if len(files) != ranks.world_size:
        raise UserError(
            f"checkpoint {folder} holds check sums of {len(files)} ranks instead of {ranks.world_size}: {remedy}"
        )
    noted = {file: value for path in files for file, value in _read_json(path, remedy).get("sums", {}).items()}
    for file in sorted(noted)[ranks.rank :: ranks.world_size]:
        if not (folder / file).is_file():
            raise UserError(f"checkpoint {folder} lacks its file {file}: {remedy}")
        if _check_sum(folder / file) != noted[file]:
            raise UserError(
                f"checkpoint file {folder / file} is damaged (its check sum is not the one it was written with): "
                f"{remedy}"
            )
    return folder


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint file {path} is missing or damaged: {remedy}") from error
    return content if isinstance(content, dict) else {}


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
