"""Gradients to reduce: the user's own files, or those of the practice model.

gradients = read_gradients("gradients/")          # one safetensors file per rank
gradients = practice_gradients(model, count=8, seed=1, folder=folder)
gradients.micro_batches                           # (M, D) fp32
read_flat(gradients.files[3])                     # (D,): the same, from the file, on another process
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_silent.config import ConfigError
from ds_silent.numerics.rounding import reference_mean
from ds_silent.practice.model import PracticeModel, PracticeRows, make_rows

ROWS = 8  # per micro-batch
DTYPES_READ = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Gradients:
    """Local gradients of M micro-batches, before any reduction."""

    micro_batches: Tensor  # (M, D) fp32
    kept: torch.dtype  # the widest dtype in which they were stored
    files: tuple[Path, ...]  # one per micro-batch
    source: str


def practice_gradients(model: PracticeModel, count: int, seed: int, folder: Path) -> Gradients:
    """Backward passes of a warm model on ``count`` micro-batches of different rows, also written to ``folder``."""
    rows = make_rows(count * ROWS, seed)
    model = copy.deepcopy(model)
    found = torch.stack([gradient_of(model, micro_batch(rows, number), (seed, number)) for number in range(count)])
    files = tuple(folder / f"micro_batch_{number}.safetensors" for number in range(count))
    for path, flat in zip(files, found, strict=True):
        save_file({"gradient": flat}, path)
    return Gradients(found, torch.float32, files, f"the practice model, {ROWS} rows per micro-batch")


def micro_batch(rows: PracticeRows, number: int) -> PracticeRows:
    chosen = slice(number * ROWS, (number + 1) * ROWS)
    return PracticeRows(rows.tokens[chosen], rows.labels[chosen])


def gradient_of(model: nn.Module, rows: PracticeRows, key: tuple[int, int]) -> Tensor:
    """(D,) fp32: one real forward and backward pass; ``key`` decides what dropout drops."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key[0] * 1_000_003 + key[1])
        model.zero_grad(set_to_none=True)
        model(rows.tokens, rows.labels).backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trainable(model)])


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def read_gradients(directory: str) -> Gradients:
    """One file per rank, all of the same names, shapes and dtypes.

    Raises:
        ConfigError: what is wrong with them.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"--gradients {directory!a} must be a directory with one safetensors file per rank")
    files = sorted(folder.glob("*.safetensors"), key=_by_number)
    if len(files) < 2:
        raise ConfigError(f"--gradients {directory!a} must hold at least 2 *.safetensors files, got {len(files)}")
    headers = [_header(path) for path in files]
    for path, header in zip(files, headers, strict=True):
        _agree(files[0], headers[0], path, header)
    kept = reduce(torch.promote_types, (dtype for _, dtype in headers[0].values()))
    micro_batches = torch.stack([_finite(path) for path in files])
    if not bool(reference_mean(micro_batches).any()):
        raise ConfigError(f"--gradients {directory!a}: the mean gradient is zero, so no error can be relative to it")
    return Gradients(micro_batches, kept, tuple(files), f"{len(files)} files in {directory!a}")


def read_flat(path: Path) -> Tensor:
    """(D,) fp32: the tensors of a file one after the other, by name; every dtype that is read widens exactly."""
    tensors = load_file(path)
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def _by_number(path: Path) -> list[tuple[int, str]]:
    """rank_10 comes after rank_2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


Header = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _header(path: Path) -> Header:
    found: Header = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                piece = file.get_slice(name)
                stored = str(piece.get_dtype())
                if stored not in DTYPES_READ:
                    raise ConfigError(
                        f"--gradients: {name!a} in {str(path)!a} must be fp32, bf16 or fp16 (F32, BF16, F16), "
                        f"got {stored}"
                    )
                found[name] = (tuple(piece.get_shape()), DTYPES_READ[stored])
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--gradients: {str(path)!a} cannot be read as safetensors: {reason}") from None
    if not found:
        raise ConfigError(f"--gradients: {str(path)!a} holds no tensor; save the gradients by parameter name")
    return found


def _agree(first: Path, expected: Header, path: Path, header: Header) -> None:
    differing = sorted(name for name in expected.keys() | header.keys() if expected.get(name) != header.get(name))
    if not differing:
        return
    name = differing[0]
    raise ConfigError(
        f"--gradients: every file must have the same names, shapes and dtypes, but {name!a} is "
        f"{_said(header.get(name))} in {str(path)!a} and {_said(expected.get(name))} in {str(first)!a}"
    )


def _said(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if entry is None else f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')}"


def _finite(path: Path) -> Tensor:
    flat = read_flat(path)
    if not bool(flat.isfinite().all()):
        raise ConfigError(f"--gradients: {str(path)!a} holds NaN or infinity; take them from a step without overflow")
    return flat
