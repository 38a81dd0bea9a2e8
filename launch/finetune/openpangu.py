"""openPangu-Embedded checkpoints, read as the Llama that they are: no remote code, weights loaded strictly.

openPangu-Embedded is a pre-norm Llama with a bias on q, k, v and o. Its parameters have Llama's names, so what is
needed is its config in Llama's terms (:func:`llama_config`) and a check that every weight is there with its shape.
The published code does not import under transformers 5.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizerFast, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

from finetune.settings import UserError

DTYPE_ARGUMENT = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
OPTIONAL = (
    *("head_dim", "hidden_act", "initializer_range", "attention_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
TIED = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class ModelError(UserError):
    """A model that cannot be loaded or saved: one sentence with the name, what is wrong and what to do."""


def is_openpangu(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "PanguEmbedded" or "PanguEmbeddedForCausalLM" in (
        config.get("architectures") or ()
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} ({error}): the checkpoint is incomplete or damaged") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_dtype(published: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The published config with the dtype of the weights that were saved with it."""
    key = "dtype" if "dtype" in published else "torch_dtype"
    return {**published, key: saved.get("dtype", saved.get("torch_dtype"))}


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """openPangu's config in Llama's terms; sizes, rope and tying are the checkpoint's own, nothing is assumed."""
    absent = [key for key in REQUIRED if config.get(key) is None]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = config.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        absent.append("rope_theta")
    if absent:
        raise ModelError(f"config.json of the openPangu checkpoint lacks {', '.join(absent)}: use the published file")
    kept = {key: config[key] for key in (*REQUIRED, *OPTIONAL) if config.get(key) is not None}
    kept["attention_bias"] = bool(config.get("bias", config.get("attention_bias", True)))
    if "rope_parameters" in inspect.signature(LlamaConfig).parameters:  # transformers 5
        kept["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": float(theta)}
    else:
        rope.pop("rope_theta", None)
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        kept.update(rope_theta=float(theta), rope_scaling=rope if scaled else None)
    try:
        return LlamaConfig(mlp_bias=False, **kept)
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json of the openPangu checkpoint is not that of a Llama: {error}") from error


def load_model(directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    """The checkpoint's weights in a Llama; every name and shape is compared before a weight is read.

    Raises:
        ModelError: missing, unexpected or mis-shaped weights, or unreadable files.
    """
    llama = llama_config(config)
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in LlamaForCausalLM(llama).state_dict().items()}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors files: the checkpoint is incomplete")
    try:
        _compare(directory, expected, _shapes(files), tied=llama.tie_word_embeddings)
        state = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                state.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read the weights in {directory} ({error}): download them again") from error
    if llama.tie_word_embeddings and TIED in state and not torch.equal(state.pop(TIED), state[EMBEDDING]):
        raise ModelError(f"{directory}: {TIED} differs from {EMBEDDING} although tie_word_embeddings is true")
    model = LlamaForCausalLM.from_pretrained(None, config=llama, state_dict=state, **{DTYPE_ARGUMENT: dtype})
    return model.to(dtype)


def load_tokenizer(directory: Path, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """From ``tokenizer.json``, else from the sentencepiece ``tokenizer.model``; never through the checkpoint's code."""
    settings = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    special = {key: _text(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    named = {key: text for key, text in special.items() if text is not None}
    try:
        if (directory / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **named)
        elif (directory / "tokenizer.model").is_file():
            tokenizer = _from_sentencepiece(directory, named, settings.get("add_bos_token", True))
        else:
            raise ModelError(f"{directory} has neither tokenizer.json nor tokenizer.model: add one of them")
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot read the tokenizer in {directory}: {reason}") from error
    # what the tokenizer's files leave open, the model's config says by id
    for role in ("pad", "bos", "eos"):
        number = config.get(f"{role}_token_id")
        if getattr(tokenizer, f"{role}_token") is None and isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer


def _from_sentencepiece(directory: Path, named: dict[str, str], add_bos: bool) -> PreTrainedTokenizerFast:
    """The ids that sentencepiece itself would give, as the published slow tokenizer does.

    One exception: where the file asks for a space before every text, a text that begins with one does not get another.
    """
    if importlib.util.find_spec("sentencepiece") is None:
        raise ModelError(
            f"reading {directory / 'tokenizer.model'} needs sentencepiece: pip install sentencepiece protobuf, or put "
            "a tokenizer.json beside it"
        )
    proto = import_protobuf().ModelProto()
    proto.ParseFromString((directory / "tokenizer.model").read_bytes())
    # LlamaTokenizer puts a space before every text unless told otherwise, whatever the file says
    prefix = proto.normalizer_spec.add_dummy_prefix
    return LlamaTokenizerFast.from_pretrained(
        directory, local_files_only=True, add_prefix_space=prefix, add_bos_token=add_bos, **named
    )


def _text(token: Any) -> str | None:
    """A special token of ``tokenizer_config.json``: a string, or an object with its ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return found


def _compare(directory: Path, expected: dict[str, Any], found: dict[str, Any], *, tied: bool) -> None:
    optional = {TIED} if tied else set()
    missing = sorted(expected.keys() - found.keys() - optional)
    unexpected = sorted(name for name in found.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq"))
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    problems = [
        f"{len(names)} {what} (first: {names[0]})"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    problems += (
        [f"{len(wrong)} mis-shaped ({wrong[0]} is {found[wrong[0]]}, config.json says {expected[wrong[0]]})"]
        if wrong
        else []
    )
    if problems:
        raise ModelError(f"the weights in {directory} do not fit its config.json: {'; '.join(problems)}")
