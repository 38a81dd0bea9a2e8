"""What a model and its parameter groups say of themselves, and what makes it untrue in silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ds_silent
from ds_silent.patches import Patches
from ds_silent.rules.first_look import FirstLook
from ds_silent.rules.loads import LostState, watch_loads
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import each, run_distributed

pytest.importorskip("transformers")
from tests.rules.small_models import model_of, words


def found(model: nn.Module, groups: list[dict[str, Any]] | None = None) -> list[tuple[str, str]]:
    """Severity and message of all that a first look finds."""
    optimizers = [torch.optim.AdamW(groups)] if groups else []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    framework: Any = SimpleNamespace(
        module=model,
        step=1,
        parameters=parameters,
        shapes=[tuple(parameter.shape) for parameter in parameters],
        optimizers=lambda: optimizers,
        parameter_groups=lambda: [group["params"] for group in groups or []],
    )
    rule = FirstLook(framework)
    assert rule.breaches() == rule.breaches()
    return [(breach.severity, breach.message) for breach in rule.breaches()]


def untied(model: nn.Module) -> nn.Module:
    """As code does that loads or resizes one of the two."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


class Adapter(nn.Module):
    """A trained addition to an embedding, of its shape."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.weight = base, nn.Parameter(torch.zeros_like(base.weight))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bert-lm", "t5", "llama"])
def test_embeddings_that_a_configuration_ties_are_one_parameter(kind: str) -> None:
    model = model_of(kind, tie_word_embeddings=True)
    assert found(model) == []
    [(severity, message)] = found(untied(model))
    assert severity == "warning"
    assert "they are two parameters" in message
    assert "None" not in message


def test_what_is_apart_by_design_is_silent() -> None:
    from transformers import BertConfig, BertForSequenceClassification, Wav2Vec2Config, Wav2Vec2ForCTC

    assert found(untied(model_of("llama", tie_word_embeddings=False))) == []
    small: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    assert found(BertForSequenceClassification(BertConfig(**small, vocab_size=16))) == []
    assert found(Wav2Vec2ForCTC(Wav2Vec2Config(**small, vocab_size=16, conv_dim=[8] * 7))) == []
    frozen = untied(model_of("llama", tie_word_embeddings=True))
    frozen.get_output_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    assert found(frozen) == []
    assert found(nn.Linear(2, 2)) == []
    adapted: Any = model_of("llama", tie_word_embeddings=True).requires_grad_(False)
    for end in ("input", "output"):
        base = getattr(adapted, f"get_{end}_embeddings")()
        getattr(adapted, f"set_{end}_embeddings")(Adapter(base))
    assert found(adapted) == []


def trained(directory: str, apart: bool) -> bool:
    """Train a small Llama under FSDP2; return whether its two embeddings are equal at the end."""
    from torch.distributed.fsdp import fully_shard

    model: Any = model_of("llama", tie_word_embeddings=True)
    fully_shard(untied(model) if apart else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(3):
            optimizer.zero_grad()
            tokens = words(2, 12, step)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    first, last = (one.weight.full_tensor() for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    return bool(torch.equal(first, last))


def test_in_a_training(tmp_path: Path) -> None:
    cases = {apart: (str(tmp_path / str(apart)), apart) for apart in (False, True)}
    assert run_distributed(each, 2, (trained, cases)) == [{False: True, True: False}] * 2
    for apart in cases:
        told = [e for e in read_events(tmp_path / str(apart) / "events.jsonl") if e["kind"] == "update-mismatch"]
        assert [(e["step"], e["severity"], e["where"]) for e in told] == [(1, "warning", "tied embeddings")] * apart


def by_name(model: nn.Module, parts: tuple[str, ...], decay: float = 0.1, **without: Any) -> list[dict[str, Any]]:
    """Two groups, as many scripts make them: those whose names have one of the parts are to have no decay."""
    named = list(model.named_parameters())
    chosen = [p for name, p in named if any(part in name for part in parts)]
    others = [p for name, p in named if not any(part in name for part in parts)]
    return [{"params": others, "weight_decay": decay}, {"params": chosen, "weight_decay": 0.0, **without}]


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    groups = [[p for p in parameters if (p.ndim < 2) is small] for small in (False, True)]
    return [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]


def test_normalisations_that_a_list_of_names_does_not_find() -> None:
    llama, gpt2 = model_of("llama"), model_of("gpt2")
    [(severity, message)] = found(llama, by_name(llama, ("bias", "LayerNorm.weight")))
    assert severity == "info"
    assert message == (
        "The weights of 5 normalisations decay (model.layers.0.input_layernorm.weight, "
        "model.layers.0.post_attention_layernorm.weight, model.layers.1.input_layernorm.weight and 2 more), although "
        "parameter group 1 has no weight decay. That group is empty."
    )
    [(severity, message)] = found(gpt2, by_name(gpt2, ("bias", "LayerNorm.weight")))
    assert severity == "info"
    assert "although parameter group 1 has no weight decay. That group holds" in message


@pytest.mark.parametrize(
    "groups",
    [
        by_dimension,
        lambda model: by_name(model, ("bias", "norm", "ln_")),
        lambda model: by_name(model, ("embed", "wte", "bias")),  # another choice
        lambda model: by_name(model, ("bias",), eps=1e-6),  # groups that differ in more than the decay
        lambda model: by_name(model, ("bias",), decay=0.0),
        lambda model: [{"params": list(model.parameters()), "weight_decay": 0.1}],
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_groups_that_mean_what_they_hold_are_silent(kind: str, groups: Any) -> None:
    model = model_of(kind)
    assert found(model, groups(model)) == []


def test_a_group_with_a_rate_of_its_own_holds_parameters() -> None:
    model = nn.Linear(2, 2)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters, "lr": 0.1}, {"params": [], "lr": 0.1}]
    assert found(model, groups) == []  # as a Trainer's without decay, of adapters
    [(severity, message)] = found(model, [*groups, {"params": [], "lr": 0.001}])
    assert (severity, message) == (
        "info",
        "Parameter group 2 has a learning rate of its own, 0.001, and holds no parameter.",
    )


def adapted(scaling: float, **config: Any) -> nn.Module:
    """A model as peft makes it: a factor on each adapter, and the configuration that it is of."""
    model = nn.ModuleDict({"attention": nn.ModuleDict({"q_proj": nn.Linear(2, 2)})})
    model["attention"]["q_proj"].scaling = {"default": scaling}  # type: ignore[index, assignment]
    model.peft_config = {"default": SimpleNamespace(**{"r": 4, "lora_alpha": 8, **config})}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("right", "config"),
    [
        (2.0, {}),
        (4.0, {"use_rslora": True}),
        (8.0, {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"attention.q_proj": 64}}),
        (1.0, {"rank_pattern": {"q_proj": 8, "k_proj": 2}, "alpha_pattern": {"proj": 64}}),
    ],
)
def test_an_adapter_is_scaled_as_its_configuration_says(right: float, config: dict[str, Any]) -> None:
    assert found(adapted(right, **config)) == []
    [(severity, message)] = found(adapted(right / 8, **config))
    assert severity == "warning"
    assert f"of attention.q_proj by {right:g} (alpha and r" in message
    assert f"it is scaled by {right / 8:g}." in message


@pytest.mark.parametrize("config", [{"alpha_pattern": {"q_.*": 64}}, {"r": None}, {"rank_pattern": {"q_proj": 2}}])
def test_what_a_pattern_means_beyond_a_name_is_not_guessed(config: dict[str, Any]) -> None:
    assert found(adapted(4.0, **config)) == []


def adapted_in(layers: list[int], asked: list[int] | int | None, **config: Any) -> nn.Module:
    """Four layers of two experts each, behind a wrapper of one module, with adapters on the experts of some layers."""
    model = nn.Sequential(nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(4)))
    for layer in layers:
        for expert in model[0][layer]:  # type: ignore[index, union-attr]
            expert.lora_A = {"default": None}
    config = {"r": 4, "lora_alpha": 8, "layers_to_transform": asked, **config}
    model.peft_config = {"default": SimpleNamespace(**config)}  # type: ignore[assignment]
    return model


def test_adapters_are_in_the_layers_that_peft_was_asked_for() -> None:
    """peft 0.19.1 took an expert's place for the layer's; ``adapted_in`` has a first number that is no layer's."""
    assert found(adapted_in([2, 3], [2, 3])) == found(adapted_in([3], 3)) == []
    assert found(adapted_in([0, 1], None)) == found(adapted_in([0], [2], layers_pattern="blocks")) == []
    [(severity, message)] = found(adapted_in([0, 3], [3]))
    assert severity == "warning"
    assert "in layer 3 alone (layers_to_transform), and 2 of 4 are in others (0.0.0, 0.0.1)." in message


def moment_after(beta: float, dtype: torch.dtype) -> tuple[float, float]:
    """A weight's second moment behind one gradient, and behind 2,000 of nearly 0 more, by torch's own AdamW.

    The first makes it 1.9 x 2^-9: of the numbers with that exponent one of the largest, which falls most easily.
    """
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer, seen = torch.optim.AdamW([weight], lr=1e-4, betas=(0.9, beta)), []
    for size in ((1.9 * 2.0**-9 / (1.0 - beta)) ** 0.5, *[0.01] * 2000):
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
        seen.append(float(optimizer.state[weight]["exp_avg_sq"]))
    return seen[0], seen[-1]


@pytest.mark.parametrize(
    ("beta", "dtype", "stays"),
    [(0.999, torch.bfloat16, True), (0.9975, torch.bfloat16, False), (0.99, torch.bfloat16, False)]
    + [(0.999, torch.float32, False), (0.999, torch.float16, False)],
)
def test_a_second_moment_that_cannot_fall(beta: float, dtype: torch.dtype, stays: bool) -> None:
    first, last = moment_after(beta, dtype)
    assert (first == last) == stays
    model = nn.Linear(2, 2).to(dtype)
    optimizer = [{"params": list(model.parameters()), "betas": (0.9, beta)}]
    assert ["keeps its second moment in bf16" in message for _, message in found(model, optimizer)] == [True] * stays


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, "0.004 of itself"), (torch.float16, "0.0005 of itself")])
def test_rotary_frequencies_that_were_cast_with_the_model(dtype: torch.dtype, error: str) -> None:
    model = model_of("llama")
    assert found(model) == []
    [(severity, message)] = found(model.to(dtype))
    assert severity == "info"
    assert error in message
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()  # type: ignore[union-attr]
    assert found(model) == []


def test_a_load_that_takes_nothing() -> None:
    model, patches = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), Patches()
    watch_loads(patches)
    try:
        of_wrapper = {f"module.{name}": value for name, value in model.state_dict().items()}
        model.load_state_dict(of_wrapper, strict=False)
        [(severity, message)] = found(nn.ModuleDict({"module": model}))
        assert severity == "warning"
        assert (
            "none of the 4 names that it was given is the model's (module.0.weight, where the model has 0.weight)"
            in (message)
        )
        model.load_state_dict(of_wrapper | {"0.weight": torch.zeros(3, 2)}, strict=False)  # a head is new
        assert found(model) == []
        model.load_state_dict({}, strict=False)
        assert found(model) == []
        model.load_state_dict(of_wrapper, strict=False)
        model.load_state_dict(model.state_dict())  # the script has tried both
        assert found(model) == []
    finally:
        patches.undo()
    model.load_state_dict(of_wrapper, strict=False)
    assert found(model) == []  # not watched


def test_weights_that_a_load_does_not_keep(tmp_path: Path) -> None:
    """``from_pretrained`` ends with ``eval()``: so long something may change what it has loaded."""
    transformers = pytest.importorskip("transformers")
    saved, patches = model_of("llama"), Patches()
    saved.save_pretrained(tmp_path)

    class Kept(type(saved)):  # type: ignore[misc]
        pass

    class Changed(type(saved)):  # type: ignore[misc]
        def eval(self) -> Any:
            with torch.no_grad():
                self.model.norm.weight.uniform_()
                self.model.layers[0].self_attn.q_proj.weight.copy_(self.model.layers[0].self_attn.q_proj.weight.flip(0))
            return super().eval()

    watch_loads(patches)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            assert found(Kept.from_pretrained(tmp_path, torch_dtype=dtype)) == []
        model = Changed.from_pretrained(tmp_path)
        [(severity, message)] = found(nn.ModuleDict({"module": model}))
        many = len(dict(saved.named_parameters()))
        assert (severity, f"1 of {many} differ (model.norm.weight)" in message) == ("warning", True), message
        model.load_state_dict(saved.state_dict())
        assert found(model) == []
        model.save_pretrained(tmp_path / "other")
        model.lm_head.weight.data.zero_()
        model.save_pretrained(tmp_path / "other" / "below")
        assert found(Kept.from_pretrained(tmp_path / "other", subfolder="below")) == []
    finally:
        patches.undo()
    assert found(Changed.from_pretrained(tmp_path)) == []  # not watched
    assert "from_pretrained" in vars(transformers.PreTrainedModel)


LOST = {
    "both": "the state of an optimizer and of a learning-rate scheduler, and the optimizer begins anew.",
    "both, names changed": "the state of an optimizer and of a learning-rate scheduler, and the optimizer begins anew.",
    "both, in a list": "the state of an optimizer and of a learning-rate scheduler, and the optimizer begins anew.",
    "optimizer": "the state of an optimizer and of a learning-rate scheduler, and the optimizer begins anew.",
    "scheduler": "the state of a learning-rate scheduler, and the scheduler begins anew.",
    "scheduler, at a step of its own": "",
    "none": "",
    "both, weights of another file": "",
    "both, weights of another file that was read first": "",
    "both, loaded once more": "",
    "both, a part of the model": "",
    "both, with a new head": "",
}


@pytest.mark.parametrize("lost", list(LOST))
def test_a_resume_that_leaves_a_state_out(lost: str, tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for _ in range(steps):
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        return model, optimizer, scheduler

    states = [one.state_dict() for one in trained(3)]
    training = states[1:] if "list" in lost else dict(zip(("o", "s"), states[1:], strict=True))
    torch.save({"model": states[0], "training": training}, tmp_path / "last.pt")
    torch.save(states[0], tmp_path / "weights.pt")
    del states
    patches, (model, optimizer, scheduler) = Patches(), trained(0)
    watch_loads(patches)
    try:
        weights = torch.load(tmp_path / "weights.pt")
        read = torch.load(tmp_path / "last.pt", weights_only=False)
        weights = torch.load(tmp_path / "weights.pt") if lost.endswith("another file") else weights
        wrapper = nn.ModuleDict({"module": model})
        if "names changed" in lost:
            wrapper.load_state_dict({f"module.{name}": value for name, value in read["model"].items()})
        else:
            model.load_state_dict(weights if "another file" in lost else read["model"])
        if "once more" in lost:
            model.load_state_dict(model.state_dict())
        if lost == "none" or lost.startswith("scheduler"):
            optimizer.load_state_dict(read["training"]["o"])
        if lost in ("none", "optimizer"):
            scheduler.load_state_dict(read["training"]["s"])
        if "own" in lost:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0, last_epoch=2)
        framework: Any = SimpleNamespace(module=model, wrapper=wrapper, step=1, optimizers=lambda: [optimizer])
        framework.schedulers = list
        if "a part" in lost or "head" in lost:
            whole = nn.ModuleDict({"body": model, **({"head": nn.Linear(2, 2)} if "head" in lost else {})})
            if "head" in lost:
                named = {f"body.{name}": value for name, value in read["model"].items()}
                whole.load_state_dict(named, strict=False)
            framework.module = whole
        rule = LostState(framework)
        rule.look(optimizer, (), {})
        said = [(one.severity, one.where, one.message) for one in rule.breaches()]
        head = "The model has taken its weights from last.pt, which also holds "
        assert said == ([("info", "last.pt", head + LOST[lost])] if LOST[lost] else [])
    finally:
        patches.undo()
    assert torch.load.__module__ == "torch.serialization"
    assert not hasattr(torch.load, "__wrapped__")
