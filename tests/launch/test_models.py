"""Loading and saving models: openPangu as a Llama, strictly; the embedded default; one sentence per mistake."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finetune import models
from finetune.data import Row
from finetune.encoding import collate, encode
from finetune.models import EMBEDDED, ModelError, load, save
from instructions import generate

IDS = torch.tensor([[1, 5, 9, 200, 33, 7]])
OPENPANGU = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_openpangu_dense.PanguEmbeddedForCausalLM"},
    "model_type": "PanguEmbedded",
    "attention_dropout": 0.0,
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 13,
    "pad_token_id": 0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 4000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 4096,
}


def reference(tied: bool = True) -> LlamaForCausalLM:
    """The Llama with the sizes above, written independently of the mapping, its biases and norms not at their zeros."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": 4e6}
    else:
        config.rope_theta = 4e6
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def write_checkpoint(directory: Path, *, shards: int = 1, tied: bool = True, **changed: Any) -> LlamaForCausalLM:
    directory.mkdir(parents=True)
    model = reference(tied)
    state = {name: value.clone() for name, value in model.state_dict().items() if not (tied and "lm_head" in name)}
    names = sorted(state)
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: state[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(OPENPANGU | {"tie_word_embeddings": tied} | changed))
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    settings = {"tokenizer_class": "PanguTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_openpangu.T", None]}}
    settings |= {"bos_token": {"content": "<s>"}, "eos_token": "[unused10]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    # running it would be seen
    (directory / "tokenization_openpangu.py").write_text("raise SystemExit('remote code was run')\n")
    (directory / "modeling_openpangu_dense.py").write_text("raise SystemExit('remote code was run')\n")
    (directory / "LICENSE").write_text("licence\n")
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (3, True), (2, False)])
def test_openpangu_is_the_llama_with_the_same_weights(tmp_path: Path, shards: int, tied: bool) -> None:
    expected = write_checkpoint(tmp_path / "pangu", shards=shards, tied=tied)
    loaded = load(str(tmp_path / "pangu"), dtype=torch.float32)
    assert loaded.kind == "openpangu"
    assert torch.equal(logits(loaded.model), logits(expected))
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) is tied
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer.eos_token_id == 13
    assert loaded.tokenizer.pad_token_id == 0
    assert load(str(tmp_path / "pangu"), dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_openpangu_rope_comes_from_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b", rope_theta=10000.0)
    a, b = (load(str(tmp_path / name), dtype=torch.float32) for name in "ab")
    assert not torch.allclose(logits(a.model), logits(b.model))


def spoil(directory: Path, change: str) -> None:
    state = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.bias"
    if change == "missing":
        del state[name]
    elif change == "unexpected":
        state["model.layers.1.self_attn.extra"] = torch.zeros(2)
    elif change == "mis-shaped":
        state[name] = torch.zeros(47)
    else:
        state["lm_head.weight"] = torch.zeros(4096, 48)
    save_file(state, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", r"1 missing \(first: model.layers.1.self_attn.o_proj.bias\)"),
        ("unexpected", r"1 unexpected \(first: model.layers.1.self_attn.extra\)"),
        ("mis-shaped", r"o_proj.bias is \(47,\), config.json says \(48,\)"),
        ("untied", r"lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true"),
    ],
)
def test_openpangu_weights_are_strict(tmp_path: Path, change: str, sentence: str) -> None:
    write_checkpoint(tmp_path / "pangu")
    spoil(tmp_path / "pangu", change)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(str(tmp_path / "pangu"), dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_openpangu_lacking_files(tmp_path: Path) -> None:
    directory = tmp_path / "pangu"
    write_checkpoint(directory, rope_theta=None)
    with pytest.raises(ModelError, match="lacks rope_theta"):
        load(str(directory), dtype=torch.float32)
    (directory / "config.json").write_text(json.dumps(OPENPANGU))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        load(str(directory), dtype=torch.float32)
    (directory / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot read the weights"):
        load(str(directory), dtype=torch.float32)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        load(str(directory), dtype=torch.float32)


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_sentencepiece_tokenizer_gives_sentencepiece_ids(tmp_path: Path, dummy_prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    write_checkpoint(tmp_path / "pangu")
    (tmp_path / "pangu" / "tokenizer.json").unlink()
    (tmp_path / "text").write_text("\n".join(row["output"].replace("\n", " ") for row in generate(1000)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pangu" / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["[unused9]", "[unused10]"],
        minloglevel=2,
    )
    tokenizer = load(str(tmp_path / "pangu"), dtype=torch.float32).tokenizer
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pangu" / "tokenizer.model"))
    texts = [row["instruction"] for row in generate(100, 9)] + ["two  spaces\n\n### Response:\n", "漢字"]
    for text in texts if dummy_prefix else [*texts, " leading"]:
        assert tokenizer(text, add_special_tokens=False).input_ids == oracle.encode(text)
    assert tokenizer.eos_token == "[unused10]"
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id == 1


def test_sentencepiece_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "pangu")
    (tmp_path / "pangu" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        load(str(tmp_path / "pangu"), dtype=torch.float32)
    (tmp_path / "pangu" / "tokenizer.json").rename(tmp_path / "pangu" / "tokenizer.model")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"needs sentencepiece: pip install sentencepiece"):
        load(str(tmp_path / "pangu"), dtype=torch.float32)


def test_openpangu_is_saved_in_its_own_naming_and_for_llama(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "pangu", shards=2)
    loaded = load(str(tmp_path / "pangu"), dtype=torch.float32)
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.up_proj.weight.add_(0.01)
    state = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    save(loaded, loaded.model, tmp_path / "out", state)

    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == OPENPANGU | {"torch_dtype": "float32"}
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == set(loaded.model.state_dict()) - {"lm_head.weight"}
    for name in ("LICENSE", "modeling_openpangu_dense.py", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "pangu" / name).read_bytes()
    again = load(str(tmp_path / "out"), dtype=torch.float32)
    assert again.kind == "openpangu"
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "llama", dtype=torch.float32)
    for model in (again.model, llama):
        assert torch.equal(logits(model), logits(loaded.model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "llama")
    assert tokenizer("Hello").input_ids == loaded.tokenizer("Hello").input_ids
    weights = [tmp_path / "out" / place / "model.safetensors" for place in ("", "llama")]
    assert os.path.samefile(*weights)


def test_embedded_model() -> None:
    loaded = load("embedded", dtype=torch.float32)
    config, tokenizer = loaded.model.config, loaded.tokenizer
    assert loaded.kind == "embedded"
    assert 1_500_000 < loaded.model.num_parameters() < 2_500_000
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 8 * 2**20
    assert config.attention_bias
    assert config.tie_word_embeddings
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert json.loads((EMBEDDED / "config.json").read_text())["rope_theta"] == 4e6
    assert len(tokenizer) == config.vocab_size == 4096
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token)
    assert ids == (0, 1, "[unused10]")
    text = "Ünïcode 漢字 1234 {x}\n\tend"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_embedded_model_is_warm_but_not_done() -> None:
    """The mean loss on the responses of the fine-tune's rows: far from log(4096) = 8.3, and not near 0."""
    loaded = load("embedded", dtype=torch.float32)
    rows = [Row(**row) for row in generate(40)]
    encoded = encode(rows, loaded.tokenizer, template="alpaca-with-input", max_length=384, append_eos=True)
    batch = collate(encoded.examples, pad_id=loaded.tokenizer.pad_token_id)
    with torch.no_grad():
        loss = loaded.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        ).loss.item()
    assert 0.6 < loss < 3.0


def test_any_causal_lm_is_saved_and_loaded(tmp_path: Path) -> None:
    loaded = load("embedded", dtype=torch.bfloat16)
    save(loaded, loaded.model, tmp_path / "out", None)
    again = load(str(tmp_path / "out"), dtype=torch.bfloat16)
    assert again.kind == "causal-lm"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for model in (again.model, plain):
        for (name, saved), (_, kept) in zip(model.state_dict().items(), loaded.model.state_dict().items(), strict=True):
            assert saved.dtype == torch.bfloat16
            assert torch.equal(saved, kept), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_crash_while_saving_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("embedded", dtype=torch.float32)
    save(loaded, loaded.model, tmp_path / "out", None)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()
    with monkeypatch.context() as patched:
        patched.setattr(type(loaded.tokenizer), "save_pretrained", full_disk)
        with pytest.raises(ModelError, match=r"cannot save the model to .*No space left on device"):
            save(loaded, loaded.model, tmp_path / "out", None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    save(loaded, loaded.model, tmp_path / "out", None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


def test_foreign_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    loaded = load("embedded", dtype=torch.float32)
    with pytest.raises(ModelError, match="holds files that are not a model"):
        save(loaded, loaded.model, tmp_path, None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_missing_pad_token_becomes_eos(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    loaded = load(str(tmp_path / "model"), dtype=torch.float32)
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == 13
    assert loaded.model.get_input_embeddings().weight.shape[0] == 4096


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "pangu")
    path = tmp_path / "pangu" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 4096, "content": "[extra]"})
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="token ids up to 4096 but the model has 4096 embeddings"):
        load(str(tmp_path / "pangu"), dtype=torch.float32)


def test_sources_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two").mkdir(exist_ok=True)
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    for source, sentence in {
        str(tmp_path / "nowhere"): "no such path",
        "nobody/nothing": r"neither a local path nor to be had from the hub \(no connection\): check the name",
        str(tmp_path / "empty"): "holds neither config.json nor a ",
        str(tmp_path / "file.bin"): r"is a file but not \*.gguf",
        str(tmp_path / "two"): r"holds 2 \*.gguf files: give the path of one",
        str(tmp_path / "two" / "a.gguf"): "cannot be loaded|needs a package",
    }.items():
        with pytest.raises(ModelError, match=sentence) as caught:
            load(source, dtype=torch.float32)
        assert repr(source) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_remote_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.C"}})
    )
    (tmp_path / "code.py").write_text("raise SystemExit('remote code was run')\n")
    with pytest.raises(ModelError, match="without remote code"):
        load(str(tmp_path), dtype=torch.float32)


def test_causal_lm_with_missing_weights(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights \(first: model\.norm\.weight\)"):
        load(str(tmp_path / "model"), dtype=torch.float32)


def test_public_names() -> None:
    assert set(models.__all__) >= {"LoadedModel", "ModelError", "load", "save"}
