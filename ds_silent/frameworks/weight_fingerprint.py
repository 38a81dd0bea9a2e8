"""Fingerprint weights, to compare two places that should hold the same ones: a trainer, an export, another engine.

    trained = ds_silent.fingerprint(engine)                     # every rank calls it
    served = ds_silent.fingerprint("exports/step-1000")         # safetensors, or torch's own files
    trained == served or trained.differs(served)                # ["model.layers.3.mlp.up_proj.weight", ...]

Only hashes are compared. Equal weights have equal fingerprints whatever the sharding, the wrapper's prefix of a name,
the dtype (bf16 or fp16 values in fp32), a tied weight that is named once or twice, and weights that are stored as one,
one behind the other (query, key and value; gate and up). Weights of other names are matched by their values alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.comparison.matching import unwrapped
from ds_silent.extras import installed
from ds_silent.maths.weight_hash import joined, weight_hash
from ds_silent.observing.observe import observer_of

FORMAT = 1
MOST_PARTS = 3  # of a weight that is stored as one: query, key and value
MOST_CANDIDATES = 12  # of one module
DEEPEST = 4  # mappings in one another, of a file
_NESTED = ("module", "model", "state_dict", "model_state_dict")  # keys under which a file holds its weights


@dataclass(frozen=True)
class WeightHash:
    """One tensor of a model: 64 bits of its values, its shape, and the dtype that it was read in."""

    hash: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def same(self, other: WeightHash) -> bool:
        """Tell whether both have the same values, in whatever shape and dtype."""
        return (self.hash, self.numel) == (other.hash, other.numel)


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Hashes of a model's weights.

    Attributes:
        tensors: by name, without the prefixes of wrappers.
        step: optimizer step of which the weights are; None where neither the caller nor the source says it.
    """

    tensors: Mapping[str, WeightHash]
    step: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and not self.differs(other)

    __hash__ = None  # type: ignore[assignment]

    def differs(self, other: Fingerprint) -> list[str]:
        """Return the names of weights that the other does not hold, or holds with other values; both sides' names.

        A name that only one side has is no difference if the other side has the same values under a name that this
        side lacks, holds them as a tied weight, or stores them together with others along the first dimension.
        """
        changed = [name for name, own in self.tensors.items() if not own.same(other.tensors.get(name, own))]
        here = {name: own for name, own in self.tensors.items() if name not in other.tensors}
        there = {name: own for name, own in other.tensors.items() if name not in self.tensors}
        here, there = _untied(here, self.tensors), _untied(there, other.tensors)
        here, there = _unmatched(here, there), _unmatched(there, here)
        for fused, parts in ((here, there), (there, here)):
            for name, whole in list(fused.items()):
                for part in _parts_of(whole, parts):
                    fused.pop(name, None)
                    parts.pop(part)
        return sorted({*changed, *here, *there})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, which :func:`fingerprint` reads."""
        tensors = {name: [f"{one.hash:016x}", list(one.shape), one.dtype] for name, one in self.tensors.items()}
        text = json.dumps({"ds_silent_fingerprint": FORMAT, "step": self.step, "tensors": tensors}, indent=0)
        Path(path).write_text(text + "\n", encoding="utf-8")


def fingerprint(weights: Any, step: int | None = None) -> Fingerprint:
    """Fingerprint a model, a state_dict, or a file.

    Args:
        weights: a module, a DeepSpeed engine, Megatron-core's list of model chunks, a state_dict, or the path of a
            ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file, of a directory with such files, or of the JSON of
            :meth:`Fingerprint.save`. A model whose weights are sharded (ZeRO-3, FSDP2) is gathered one tensor at a
            time, so every rank calls this. Of a tensor-parallel model each rank fingerprints its own part.
        step: optimizer step of the weights, if the source does not say it.

    Raises:
        ValueError: there are no weights in it, or the file cannot be read; one sentence.
    """
    if isinstance(weights, (str, Path)):
        found = _of_path(Path(weights))
        return found if step is None else Fingerprint(found.tensors, step)
    if isinstance(weights, Mapping):
        tensors, own_step = _hashes(_tensors(_innermost(weights))), None
    else:
        chunks = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        models = [_module_of(chunk) for chunk in chunks]
        prefixes = [f"{index}." if len(models) > 1 else "" for index in range(len(models))]
        named = ((prefix + name, t) for prefix, m in zip(prefixes, models, strict=True) for name, t in _named(m))
        tensors, own_step = _hashes(named), _step_of(chunks[0])
    if not tensors:
        raise ValueError(f"ds_silent.fingerprint found no weights in the {type(weights).__name__} that it was given")
    return Fingerprint(tensors, own_step if step is None else step)


def _untied(alone: dict[str, WeightHash], own: Mapping[str, WeightHash]) -> dict[str, WeightHash]:
    """Leave out second names of weights that the same side also has under a name that both sides have."""
    shared = {(each.hash, each.numel) for name, each in own.items() if name not in alone}
    return {name: each for name, each in alone.items() if (each.hash, each.numel) not in shared}


def _unmatched(own: dict[str, WeightHash], other: Mapping[str, WeightHash]) -> dict[str, WeightHash]:
    values = {(each.hash, each.numel) for each in other.values()}
    return {name: each for name, each in own.items() if (each.hash, each.numel) not in values}


def _parts_of(whole: WeightHash, candidates: Mapping[str, WeightHash]) -> tuple[str, ...]:
    """Return the names of the weights of one module that one is made of, in order; empty if it is not made of them."""
    modules: dict[str, list[str]] = {}
    for name, each in candidates.items():
        if whole.shape and each.shape[1:] == whole.shape[1:] and each.shape[0] < whole.shape[0]:
            modules.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    for names in (names for names in modules.values() if len(names) <= MOST_CANDIDATES):
        for count in range(2, MOST_PARTS + 1):
            for chosen in permutations(names, count):
                pieces = [(candidates[name].hash, candidates[name].numel) for name in chosen]
                if sum(numel for _, numel in pieces) == whole.numel and joined(*pieces) == whole.hash:
                    return chosen
    return ()


def _hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, WeightHash]:
    found: dict[str, WeightHash] = {}
    for name, tensor in tensors:
        with _whole(tensor) as whole:
            found[name] = WeightHash(weight_hash(whole), tuple(whole.shape), str(whole.dtype).split(".")[-1])
    empty = [name for name, each in found.items() if not each.numel]
    if 2 * len(empty) > len(found):
        raise ValueError(
            f"ds_silent.fingerprint found no values in {len(empty)} of {len(found)} weights, such as {empty[0]}: of a "
            "model that is sharded give the engine or model itself, on every rank, or a checkpoint of whole weights"
        )
    plain = {unwrapped(name): each for name, each in found.items()}
    return plain if len(plain) == len(found) else found


@contextmanager
def _whole(tensor: Tensor) -> Iterator[Tensor]:
    """Give the whole of a tensor of which this rank may hold a shard, for the length of a ``with``."""
    partitioned = hasattr(tensor, "ds_tensor")  # DeepSpeed, zero/partition_parameters.py, 0.16.9 to 0.19.8
    with sys.modules["deepspeed"].zero.GatheredParameters([tensor]) if partitioned else nullcontext():
        full: Any = getattr(tensor.detach(), "full_tensor", None)  # torch's DTensor
        yield tensor.detach() if full is None else full()


def _module_of(training: Any) -> nn.Module:
    module = training if isinstance(training, nn.Module) else getattr(training, "module", None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "ds_silent.fingerprint takes a module, an engine, a list of Megatron-core's chunks, a state_dict or a "
            f"path, got a {type(training).__name__}"
        )
    return module


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, as the model names them; tied ones under each name."""
    return _tensors(module.state_dict(keep_vars=True))


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((str(name), value) for name, value in values.items() if isinstance(value, Tensor))


def _step_of(training: Any) -> int | None:
    observer = observer_of(training) if hasattr(training, "__dict__") else None
    if observer is not None:
        return observer.step
    steps = getattr(training, "global_steps", None)
    return steps if isinstance(steps, int) else None


# -- Files -------------------------------------------------------------------------------------------------------------


def _of_path(path: Path) -> Fingerprint:
    if path.suffix == ".json":
        return _saved(path)
    files = _files(path)
    tensors: dict[str, WeightHash] = {}
    for file in files:
        of_file = _hashes(_read(file))
        if twice := sorted(tensors.keys() & of_file):
            raise ValueError(
                f"{twice[0]} is in several files of {path}: each holds a part of the model, so give one file"
            )
        tensors |= of_file
    if not tensors:
        raise ValueError(f"{path} holds no weights")
    return Fingerprint(tensors, _step_in(path))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_file():
        return [path]
    for pattern in ("*.safetensors", "pytorch_model*.bin", "mp_rank_*_model_states.pt", "*.pt", "*.pth", "*.bin"):
        found = sorted(path.glob(pattern))
        if found:
            return found
    raise ValueError(f"{path} has no .safetensors, .bin, .pt or .pth file")


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        if not installed("safetensors"):
            raise ValueError(f"{file} needs the package safetensors: pip install safetensors")
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
        return
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)  # tensors and plain values, no code
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"{file} cannot be read as weights alone, without running code from it: {reason}") from error
    yield from _tensors(_innermost(held))


def _innermost(held: Any) -> Mapping[str, Any]:
    """Return the mapping that holds the weights: that below one of the usual keys, else the outermost."""
    for _ in range(DEEPEST):
        inner = next(
            (held[key] for key in _NESTED if isinstance(held, Mapping) and isinstance(held.get(key), Mapping)), None
        )
        held = held if inner is None else inner
    return held if isinstance(held, Mapping) else {}


def _step_in(path: Path) -> int | None:
    """The step that a directory's name or the Trainer's state says: checkpoint-500, global_step500."""
    folder = path if path.is_dir() else path.parent
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return int(state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    for prefix in ("checkpoint-", "global_step", "step-", "step_"):
        if folder.name.startswith(prefix) and folder.name[len(prefix) :].isdecimal():
            return int(folder.name[len(prefix) :])
    return None


def _saved(path: Path) -> Fingerprint:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["ds_silent_fingerprint"] != FORMAT:
            raise ValueError(f"format {held['ds_silent_fingerprint']}, this version reads {FORMAT}")
        tensors = {
            str(name): WeightHash(int(digest, 16), tuple(map(int, shape)), str(dtype))
            for name, (digest, shape, dtype) in held["tensors"].items()
        }
        return Fingerprint(tensors, None if held["step"] is None else int(held["step"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a fingerprint that ds_silent wrote: {error}") from error
