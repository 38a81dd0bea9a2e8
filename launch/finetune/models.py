"""Models of the fine-tune: the embedded default, openPangu-Embedded, GGUF files and any other causal language model.

    loaded = load("embedded", dtype=torch.bfloat16)          # or a directory, a *.gguf file, a hub id
    save(loaded, engine.module, Path("runs/my-run/model"), state_dict)

No code of a checkpoint is ever run: ``trust_remote_code`` stays False, and openPangu is loaded as the Llama that it is
(``openpangu.py``).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune import openpangu
from finetune.openpangu import DTYPE_ARGUMENT, ModelError

__all__ = ["EMBEDDED", "LoadedModel", "ModelError", "load", "save"]

Kind = Literal["embedded", "openpangu", "causal-lm"]
EMBEDDED = Path(__file__).parent / "embedded"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.model", "*.py", "*.txt", "LICENSE*", "NOTICE*"]
# what a checkpoint of openPangu holds beside its weights and config: tokenizer, its own code, its licence and notice
COMPANIONS = (
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "generation_config.json",
    "*.py",
    "LICENSE*",
    "*otice*",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model in the asked dtype, on the CPU, and its tokenizer, which has a pad token."""

    model: PreTrainedModel
    tokenizer: Any  # a transformers tokenizer
    source: str  # as the user gave it
    kind: Kind
    directory: Path | None = None  # where the checkpoint lies
    published_config: Mapping[str, Any] | None = None  # openPangu's own config.json


def load(source: str, *, dtype: torch.dtype, revision: str | None = None) -> LoadedModel:
    """Model and tokenizer of ``source``; every rank calls it for itself, nothing is communicated.

    Args:
        source: ``"embedded"``; a directory or a ``*.gguf`` file; else a hub id (downloaded, or found in the cache).
        dtype: of the weights.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelError: one sentence that names the source, what is wrong with it and what to do.
    """
    if source == "embedded":
        return _causal_lm(source, EMBEDDED, None, dtype, "embedded")
    path = _find(source, revision)
    gguf = _gguf_file(source, path)
    if gguf is not None:
        return _causal_lm(source, gguf.parent, gguf.name, dtype, "causal-lm")
    config = openpangu.read_json(path / "config.json")
    if not openpangu.is_openpangu(config):
        return _causal_lm(source, path, None, dtype, "causal-lm")
    model = openpangu.load_model(path, config, dtype)
    tokenizer = openpangu.load_tokenizer(path, config)
    return _checked(LoadedModel(model, tokenizer, source, "openpangu", path, config))


def save(loaded: LoadedModel, model: torch.nn.Module, directory: Path, state_dict: dict[str, Any] | None) -> None:
    """Writes the trained model in Hugging Face format; rank 0 alone calls it.

    ``AutoModelForCausalLM.from_pretrained(directory)`` loads it, except for openPangu: there ``directory`` is a
    checkpoint in openPangu's own naming (its ``config.json``, tokenizer, code and licence as they were published),
    which :func:`load` and every tool made for openPangu read, but which ``AutoModelForCausalLM`` reads only with the
    published remote code. So its sub-directory ``llama`` holds the same weights (hard links where the file system has
    them) under a Llama config: ``AutoModelForCausalLM.from_pretrained(directory / "llama")`` needs no remote code.

    The files are written to a hidden directory beside ``directory`` that is renamed at the end: a crash leaves the
    old model or the new one, never half of one.

    Args:
        loaded: what :func:`load` returned.
        model: the trained module, without a wrapper.
        directory: replaced when it holds a model already.
        state_dict: the full weights when the module's own are sharded (ZeRO 3); None takes the module's.

    Raises:
        ModelError: the directory holds something else, or cannot be written.
    """
    directory = Path(os.path.abspath(directory))  # a relative name like "." has no neighbour
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise ModelError(f"{directory} holds files that are not a model, so it is not replaced: choose another one")
    writer = model if isinstance(model, PreTrainedModel) else loaded.model
    partial = directory.with_name(f".{directory.name}.partial")
    previous = directory.with_name(f".{directory.name}.previous")
    try:
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        writer.save_pretrained(partial, state_dict=_without_tied(writer, state_dict or model.state_dict()))
        if loaded.kind == "openpangu":
            _add_openpangu(loaded, partial)
        else:
            loaded.tokenizer.save_pretrained(partial)
        if directory.exists():
            directory.rename(previous)
        partial.rename(directory)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(f"cannot save the model to {directory} ({error}): choose a writable disk with room") from error


def _without_tied(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what is tied to another weight: gathered copies no longer share memory, so nobody could see it."""
    tied = (model._tied_weights_keys or ()) if model.config.tie_word_embeddings else ()  # names: a dict or a list
    return {name: value for name, value in state_dict.items() if name not in tied}


def _add_openpangu(loaded: LoadedModel, directory: Path) -> None:
    """Turns a saved Llama into an openPangu checkpoint with the Llama as a sub-directory."""
    llama = directory / "llama"
    llama.mkdir()
    for path in list(directory.iterdir()):
        if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
            _link(path, llama / path.name)
        elif path.suffix == ".json":
            path.rename(llama / path.name)
    loaded.tokenizer.save_pretrained(llama)
    assert loaded.published_config is not None
    config = openpangu.with_dtype(loaded.published_config, openpangu.read_json(llama / "config.json"))
    openpangu.write_json(directory / "config.json", config)
    companions = {path for pattern in COMPANIONS for path in (loaded.directory or directory).glob(pattern)}
    for path in companions:
        if path.is_file():
            shutil.copyfile(path, directory / path.name)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _find(source: str, revision: str | None) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not HUB_ID.fullmatch(source):
        raise ModelError(
            f"model {source!r}: no such path; give an existing one, a hub id like owner/name, or 'embedded'"
        )
    try:
        found = Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"model {source!r} is neither a local path nor to be had from the hub ({_first_line(error)}): check the "
            "name, or download it and give its directory"
        ) from error
    if not any(found.glob("*.safetensors")):
        raise ModelError(f"model {source!r} has no *.safetensors files on the hub: choose one that has")
    return found


def _gguf_file(source: str, path: Path) -> Path | None:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {source!r} is a file but not *.gguf: give the directory of the checkpoint")
        return path
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        held = f"{len(files)} *.gguf files: give the path of one" if files else "neither config.json nor a *.gguf file"
        raise ModelError(f"model {source!r} holds {held}")
    return files[0]


def _causal_lm(source: str, path: Path, gguf: str | None, dtype: torch.dtype, kind: Kind) -> LoadedModel:
    """What transformers knows by itself; ``gguf`` is a file in ``path``, dequantised to ``dtype``."""
    chosen = {} if gguf is None else {"gguf_file": gguf}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **{DTYPE_ARGUMENT: dtype},
            **chosen,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, **chosen)
    except ImportError as error:
        raise ModelError(f"model {source!r} needs a package that is missing: {_first_line(error)}") from error
    except Exception as error:  # foreign files in a dozen foreign parsers: any of their errors means the same
        raise ModelError(
            f"model {source!r} cannot be loaded as a causal language model without remote code: {_first_line(error)}"
        ) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f"model {source!r} lacks {len(missing)} weights (first: {missing[0]}), which would be random: complete it"
        )
    if gguf is not None:
        model = _unquantised(model, dtype)
    return _checked(LoadedModel(model.to(dtype), tokenizer, source, kind, path))


def _unquantised(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in a model that does not call itself quantised: transformers refuses to save one that does."""
    config = type(model.config)(
        **{key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    return type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **{DTYPE_ARGUMENT: dtype})


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _checked(loaded: LoadedModel) -> LoadedModel:
    """Gives the tokenizer a pad token (eos: the labels are masked by position) and compares it with the embeddings."""
    tokenizer, model = loaded.tokenizer, loaded.model
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer of model {loaded.source!r} has no pad and no eos token: set eos_token")
        tokenizer.pad_token = tokenizer.eos_token
    largest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ModelError(
            f"the tokenizer of model {loaded.source!r} has token ids up to {largest} but the model has {rows} "
            "embeddings: give the tokenizer that belongs to the model"
        )
    model.config.use_cache = False  # a training keeps no past keys and values
    return replace(loaded)
