"""The probe: it tells what a causal model sees and may not, and leaves no trace in the training."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ds_silent
from ds_silent.drill.training import hash_of
from ds_silent.patches import Patches
from ds_silent.rules.causal_probe import CausalProbe
from ds_silent.sinks.jsonl import read_events
from tests.rules.small_models import PADDING, model_of, words
from tests.support.distributed import each, run_on_kept_ranks

ROWS, LENGTH = 4, 24
Inputs = dict[str, Any]


def plain(seed: int = 0) -> Inputs:
    ids = words(ROWS, LENGTH, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def packed(seed: int = 0) -> Inputs:
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9))).expand(ROWS, -1)
    return {**plain(seed), "position_ids": positions}


def padded(seed: int = 0) -> Inputs:
    """Pad to the left, by 0 to 6 tokens."""
    inputs = plain(seed)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    for row in range(ROWS):
        mask[row, : 2 * row] = 0
    inputs["input_ids"] = inputs["input_ids"].masked_fill(mask == 0, PADDING)
    return {**inputs, "attention_mask": mask, "labels": inputs["input_ids"].masked_fill(mask == 0, -100)}


def ones(inputs: Inputs) -> Inputs:
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def sees_all(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, None, is_causal=False, **more)


def sees_one_more(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    """Be wrong by one: each place sees the next one, too."""
    wrong = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)[None, None]
    return sdpa_attention_forward(module, query, key, value, wrong, **more)


def sees_padding(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **more)


for leak in (sees_all, sees_one_more, sees_padding):
    AttentionInterface.register(leak.__name__, leak)


def probed(model: nn.Module, inputs: Inputs, alone: bool = True) -> tuple[Any, ...]:
    framework: Any = SimpleNamespace(module=model, step=1, forwards_alone=alone)
    rule, patches = CausalProbe(framework), Patches()
    rule.connect(patches, lambda function, *arguments: function(*arguments))
    model.train()
    model(**inputs).loss.backward()
    patches.undo()
    return rule.breaches()


def names(model: nn.Module, inputs: Inputs) -> list[str]:
    return [breach.key.removeprefix("probe:") for breach in probed(model, inputs)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_sound_forward_moves_nothing(kind: str, attention: str) -> None:
    more = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if kind == "gpt2" else {"attention_dropout": 0.1}
    model = model_of(kind, attn_implementation=attention, **more)
    for inputs in (plain(), ones(plain()), padded(), *([packed()] if kind != "gpt2" else [])):
        assert probed(model, inputs) == ()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_that_see_each_other_are_told(attention: str) -> None:
    model = model_of("llama", attn_implementation=attention)
    found = probed(model, ones(packed()))
    assert [(b.key, b.kind, b.severity) for b in found] == [("probe:document", "batch-suspect", "warning")]
    assert names(model, packed()) == []
    model.config.use_cache = True  # type: ignore[union-attr]  # transformers looks for documents without a cache only
    assert names(model, packed()) == ["document"]


@pytest.mark.parametrize(
    ("leak", "inputs", "told"),
    [
        ("sees_all", plain(), ["later"]),
        ("sees_one_more", plain(), ["later"]),
        ("sees_all", packed(), ["later", "document"]),
        ("sees_padding", padded(), ["padding"]),
        ("sees_padding", plain(), []),
    ],
)
def test_a_leak_is_told_by_what_is_seen(leak: str, inputs: Inputs, told: list[str]) -> None:
    assert names(model_of("llama", attn_implementation=leak), inputs) == told
    half = model_of("llama", attn_implementation=leak).bfloat16()
    assert names(half, inputs) == told


@pytest.mark.parametrize(
    ("leak", "noise", "dtype", "told"),
    [
        (1e-6, 0.0, "fp32", False),  # as rounding
        (3e-3, 0.0, "fp32", True),
        (3e-3, 0.0, "bf16", False),
        (0.1, 0.0, "bf16", True),
        (3e-3, 0.0, "autocast", False),
        (0.1, 0.0, "autocast", True),
        (0.1, 0.05, "fp32", False),  # less than eight times what a repetition moves
        (0.1, 0.001, "fp32", True),
    ],
)
def test_a_leak_is_told_where_it_is_more_than_rounding_and_the_forward_s_own_noise(
    leak: float, noise: float, dtype: str, told: bool
) -> None:
    model: Any = model_of("llama").to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    head, calls = model.lm_head, iter(range(9))

    def moved(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        """Add a pattern whose size is a share of the spread: by the last token, and by the number of the call."""
        spread, pattern = logits.detach().float().std(-1, keepdim=True), torch.randn(logits.shape[-1:])
        share = leak * model.last[:, None, None] + noise * next(calls)
        return logits + (spread * pattern * share).to(logits.dtype)

    def note(module: Any, inputs: Any) -> None:
        model.last = (inputs[0][:, -1] % 2).float()

    model.model.embed_tokens.register_forward_pre_hook(note)
    head.register_forward_hook(moved)
    inputs = plain()
    inputs["input_ids"][:, -1] = 10
    inputs["input_ids"][:, 10:-1] = 11
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        assert names(model, inputs) == (["later"] if told else [])


def test_places_of_padding_are_not_watched() -> None:
    """Of rows of four tokens behind twenty of padding; what stands at padding attends to the whole row."""
    inputs = padded()
    inputs["attention_mask"][:, :-4] = 0
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, PADDING)
    assert names(model_of("llama", attn_implementation="eager"), inputs) == []
    assert names(model_of("llama", attn_implementation="sees_all"), inputs) == ["later", "padding"]


def test_a_row_whose_tokens_have_no_others_has_no_part() -> None:
    """Of six rows two can be changed: there is one other token in the whole batch."""
    ids = torch.full((6, LENGTH), 10)
    ids[0, 20] = 11
    assert names(model_of("llama", attn_implementation="sees_all"), {"input_ids": ids, "labels": ids}) == ["later"]


@pytest.mark.parametrize(("rows", "told"), [((1.0, 0.0, 0.0, 0.0), 0), ((1.0, 1.0, 0.0, 0.0), 1)])
def test_half_of_the_rows_must_have_moved(rows: tuple[float, ...], told: int) -> None:
    framework: Any = SimpleNamespace(module=nn.Identity(), step=1)
    rule, trial = CausalProbe(framework), SimpleNamespace(name="later")
    rule._judge([trial], [torch.tensor(rows)], 0.5)  # type: ignore[list-item]
    assert len(rule.breaches()) == told


def test_a_forward_without_gradient_is_no_training_forward() -> None:
    model = model_of("llama", attn_implementation="sees_all")
    framework: Any = SimpleNamespace(module=model.train(), step=1, forwards_alone=True)
    rule, patches = CausalProbe(framework), Patches()
    rule.connect(patches, lambda function, *arguments: function(*arguments))
    with torch.no_grad():
        model(**plain())
    assert rule.breaches() == ()
    model(**plain())
    assert len(rule.breaches()) == 1
    patches.undo()


def test_hidden_states_are_compared_where_a_fused_loss_makes_no_logits() -> None:
    few = {"logits_to_keep": 4, "labels": plain()["labels"][:, -4:]}
    assert names(model_of("llama", attn_implementation="sees_one_more"), {**plain(), **few}) == ["later"]
    sound = model_of("llama")
    assert names(sound, {**plain(), **few}) == []
    assert not sound.base_model._forward_hooks


def test_what_cannot_be_probed_is_said_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ds_silent")
    llama = model_of("llama")

    def why(model: nn.Module, inputs: Inputs, alone: bool = True) -> str:
        caplog.clear()
        assert probed(model, inputs, alone) == ()
        return caplog.messages[-1].removeprefix("ds_silent: probe: not probed: ")

    assert (
        why(model_of("bert-lm"), plain())
        == "it needs one causal language model of transformers, whose loss and attention modules all say so"
    )
    assert why(llama, plain(), alone=False) == "other ranks take part in each forward"
    embedded = {"inputs_embeds": llama.model.embed_tokens(plain()["input_ids"]), "labels": plain()["labels"]}  # type: ignore
    assert why(llama, embedded) == "the forward is given inputs_embeds"
    assert why(llama, {name: value[:, :1] for name, value in plain().items()}) == "its rows are too short"
    bare = model_of("llama")
    bare.base_model_prefix = "nothing"  # type: ignore
    assert why(bare, {**plain(), "logits_to_keep": 4, "labels": plain()["labels"][:, -4:]}).endswith("of every place")
    llama.model.embed_tokens.register_forward_hook(lambda m, a, out: out + next(noise))  # type: ignore
    noise = iter(range(9))
    assert why(llama, plain()) == "the forward returns other logits, or none that are finite, when it is repeated"
    compiled = model_of("llama")
    compiled.model.layers[0]._compiled_call_impl = compiled.model.layers[0]._call_impl  # type: ignore
    assert why(compiled, plain()) == "the model is compiled, and would be compiled anew"


class Counting(nn.Module):
    """Draw random numbers of all kinds, and count and average, as routers and norms do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("seen", torch.zeros(1))
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.seen += 1
        self.seen = self.seen * 1.5  # another object
        drawn = random.random() + numpy.random.random() + float(torch.rand(()))
        result: Any = self.inner(hidden, *args, **kwargs)
        return result + 0.01 * self.norm(hidden) * drawn


def trained(watched: bool, autocast: bool) -> Iterator[Any]:
    """Train with dropout; yield everything that is left, to the bit."""
    model: Any = model_of("gpt2", resid_pdrop=0.2, attn_pdrop=0.2)
    model.transformer.h[0].mlp = Counting(model.transformer.h[0].mlp)
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    framework: Any = SimpleNamespace(module=model, step=1, forwards_alone=True)
    rule, patches = CausalProbe(framework), Patches()
    if watched:
        rule.connect(patches, lambda function, *arguments: function(*arguments))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**plain(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())
    assert not watched or rule._done
    yield hash_of(model.state_dict().values())
    yield from (model.transformer.h[0].mlp.calls, float(model.transformer.h[0].mlp.seen))
    yield from (random.random(), numpy.random.random(), float(torch.rand(())), rule.breaches())


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_random_numbers_and_counters_are_as_without_the_probe(autocast: bool) -> None:
    assert list(trained(True, autocast)) == list(trained(False, autocast))


@pytest.mark.parametrize("cached", [False, True])
def test_nothing_that_the_probe_casts_is_kept_for_the_training(cached: bool) -> None:
    """Versions of torch differ in whether they keep what was cast without gradient."""
    model: Any = model_of("llama")
    calls: list[tuple[bool, bool]] = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda *_: calls.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
    )
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        assert probed(model, plain()) == ()
    assert calls == [(False, False)] * 3 + [(True, cached)], "twice as it is, once with other tokens; then the training"


# -- in trainings ------------------------------------------------------------------------------------------------------


def train(directory: Path, framework: str, watched: bool) -> str:
    model: Any = model_of("llama", attention_dropout=0.2)
    block = {"output_dir": str(directory), "tensorboard": False, "probe": True}
    if framework == "ddp":
        engine: Any = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)
        if watched:
            ds_silent.attach(engine, optimizer=optimizer, config=block)
    else:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(framework)},
            **({"silent_consistency": block} if watched else {}),
        }
        initialize = ds_silent.initialize if watched else deepspeed.initialize
        engine, optimizer, *_ = initialize(model=model, config=config)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(3):
        loss = engine(**ones(packed(10 * step + dist.get_rank()))).loss
        if framework == "ddp":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
    if watched:
        observer = ds_silent.observer_of(engine)
        assert observer is not None
        observer.close()
    if framework == "3":
        return ""
    return hash_of(model.state_dict().values())


@pytest.mark.parametrize("framework", ["ddp", "2"])
def test_a_training_is_probed_and_its_weights_are_the_same(tmp_path: Path, framework: str) -> None:
    cases = {watched: (tmp_path, framework, watched) for watched in (True, False)}
    for hashes in run_on_kept_ranks(each, 2, (train, cases)):
        assert hashes[True] == hashes[False]
    found = [(e["kind"], e["severity"], e["where"], e["ranks"]) for e in read_events(tmp_path / "events.jsonl")]
    suspects = [one for one in found if one[0] == "batch-suspect"]
    assert suspects == [("batch-suspect", "warning", "position_ids", []), ("batch-suspect", "warning", "attention", [])]


def test_where_a_forward_takes_all_ranks_nothing_is_run(tmp_path: Path) -> None:
    run_on_kept_ranks(train, 2, (tmp_path, "3", True))
    found = [(e["kind"], e["where"]) for e in read_events(tmp_path / "events.jsonl")]
    assert ("batch-suspect", "position_ids") in found, "the batch is looked at all the same"
    assert ("batch-suspect", "attention") not in found
