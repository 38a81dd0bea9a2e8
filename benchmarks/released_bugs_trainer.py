"""released_bugs.py: trainings by transformers' Trainer and by TRL's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from released_bugs_base import (
    EOS,
    RATE,
    SEED,
    STEPS,
    VOCABULARY,
    Found,
    Watch,
    against,
    case,
    flat,
    load,
    mean_over_ranks,
)


def as_launched() -> None:
    """Tell accelerate what torchrun would: several processes on CPUs."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)


def arguments_of(directory: Path, kind: Any = None, **given: Any) -> Any:
    """TrainingArguments for plain SGD without clipping, or those of one of TRL's trainers."""
    import transformers

    named: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "accelerator_config": {"use_configured_state": True},
        "seed": SEED,
        **given,
    }
    return (kind or transformers.TrainingArguments)(str(directory), **named)


def llama(kind: str = "Llama", **given: Any) -> Any:
    """A tiny language model of one of transformers' families."""
    import torch
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if kind == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        sizes |= {"attn_pdrop": 0.0, "attn_implementation": "eager"}
    if kind == "Bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{kind}Config")
    tokens = {"bos_token_id": 2, "eos_token_id": EOS, "pad_token_id": 0}
    head = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    return getattr(transformers, f"{kind}{head}")(config(vocab_size=VOCABULARY, **sizes, **tokens, **given))


def uneven_rows(count: int, first: bool) -> list[dict[str, Any]]:
    """Rows of 4 to 30 tokens, the same on every rank. A row's first label is predicted from nothing: kept or not."""
    import torch

    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 31, (count,), generator=generator).tolist()
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": [row[0] if first else -100, *row[1:]]} for row in rows]


@dataclass
class Collator:
    """Pads, and keeps every batch that this rank trains on."""

    batches: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        import torch

        longest = max(len(row["input_ids"]) for row in rows)
        filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        given = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
        padded = {
            key: torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in given])
            for key, fill in filled.items()
        }
        self.batches.append({key: value.clone() for key, value in padded.items()})
        return padded


def tokenizer_of(start: bool = False, template: str = "") -> Any:
    """Words ``w3`` to ``w63``, no padding of its own; with ``start``, every text gets a beginning."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "</s>": EOS, "<s>": 2, **{f"w{place}": place for place in range(3, VOCABULARY)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if start:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    named = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    if template:
        named.chat_template = template
    return named


def weights_at_steps(model: Any, steps: list[tuple[Any, Any]]) -> Any:
    """A callback that appends the weights before and after each step."""
    import transformers

    class Weights(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.append((copy.deepcopy([one.data for one in model.parameters()]), None))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps[-1] = (steps[-1][0], copy.deepcopy([one.data for one in model.parameters()]))

    return Weights()


def token_mean(plain: Any, batches: Sequence[dict[str, Any]], smoothing: float, trained: Any = None) -> Any:
    """(D,) float64: the gradient of the mean over all label tokens of all ranks and micro-batches."""
    import torch

    total: Any = 0.0
    for batch in batches:
        logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", label_smoothing=smoothing
        )
    trained = list(plain.parameters()) if trained is None else trained
    labels = torch.tensor(float(sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)), dtype=torch.float64)
    gradient = flat(torch.autograd.grad(total, trained))
    return mean_over_ranks(gradient) / mean_over_ranks(labels)


def trained(
    watch: Watch, family: str, kind: str = "", model_given: Any = None, first: bool = False, **given: Any
) -> Any:
    """Train by the Trainer or TRL's SFTTrainer on rows of unequal lengths.

    Returns the model, its copy in float64, the weights around each step, and each step's batches.
    """
    import transformers

    as_launched()
    steps: list[tuple[Any, Any]] = []
    model = llama(family, **(model_given or {}))
    plain = copy.deepcopy(model).double()
    collator, rows = Collator(), uneven_rows(2 * 2 * 4 * STEPS, first)
    shared = {"data_collator": collator, "callbacks": [*watch.callbacks(), weights_at_steps(model, steps)]}
    if kind == "SFT":
        import datasets
        import trl

        arguments = arguments_of(
            watch.directory, trl.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, max_length=64, **given
        )
        whole = datasets.Dataset.from_list(rows)
        trainer = trl.SFTTrainer(model, arguments, train_dataset=whole, processing_class=tokenizer_of(), **shared)
    else:
        arguments = arguments_of(watch.directory, **given)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, **shared)
    trainer.train()
    return model, plain, steps, [collator.batches[4 * step : 4 * step + 4] for step in range(len(steps))]


@case
def tokens(watch: Watch, family: str = "Llama", kind: str = "", **given: Any) -> Found:
    """The Trainer's step against the mean over all label tokens of the step."""
    _, plain, steps, batches = trained(watch, family, kind, **given)
    applied, true = [], []
    for (before, after), own in zip(steps, batches, strict=True):
        load(plain, before)
        applied.append((flat(before) - flat(after)) / RATE)
        true.append(token_mean(plain, own, given.get("label_smoothing_factor", 0.0)))
    return against(applied, true, "the mean over the step's label tokens")


@case
def masked_words(watch: Watch) -> Found:
    """The Trainer, and a model whose forward takes further arguments and the mean: the step against that mean."""
    import torch

    _, plain, steps, batches = trained(watch, "Bert", first=True)
    applied, true, parameters = [], [], list(plain.parameters())
    for (before, after), own in zip(steps, batches, strict=True):
        load(plain, before)
        loss: Any = 0.0
        for batch in own:
            logits = plain(batch["input_ids"], batch["attention_mask"]).logits.flatten(0, 1)
            loss = loss + torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()) / len(own)
        applied.append((flat(before) - flat(after)) / RATE)
        true.append(mean_over_ranks(flat(torch.autograd.grad(loss, parameters))))
    return against(applied, true, "the mean of the losses")


@case
def routers(watch: Watch) -> Found:
    """A mixture of experts: how often the auxiliary loss counts in the routers' steps, beside the tokens' loss."""
    import torch

    coefficient = 0.5
    given = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    _, plain, steps, batches = trained(
        watch, "Mixtral", model_given={**given, "router_aux_loss_coef": coefficient, "experts_implementation": "eager"}
    )
    names = [name for name, _ in plain.named_parameters()]
    gates = [place for place, name in enumerate(names) if name.endswith("gate.weight")]
    counts = []
    for (before, after), own in zip(steps, batches, strict=True):
        load(plain, before)
        here = [list(plain.parameters())[place] for place in gates]
        alone = token_mean(plain, own, 0.0, here)
        auxiliary = [plain(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).aux_loss for one in own]
        balance = mean_over_ranks(flat(torch.autograd.grad(sum(auxiliary) / len(own), here)))
        applied = flat(before[place] - after[place] for place in gates) / RATE
        counts.append(float((applied - alone) @ balance / (balance @ balance)) / coefficient)
    return Found(tuple(abs(count - 1) for count in counts), f"the auxiliary loss counts {counts[0]:.3f} times")


@case
def decay(watch: Watch, family: str) -> Found:
    """The norms' weights, which the Trainer promises not to decay: their step against the gradient alone."""
    _, plain, steps, batches = trained(watch, family, weight_decay=0.5)
    names = [name for name, _ in plain.named_parameters()]
    norms = [place for place, name in enumerate(names) if "norm" in name]
    errors = []
    for (before, after), own in zip(steps, batches, strict=True):
        load(plain, before)
        here = [list(plain.parameters())[place] for place in norms]
        true = token_mean(plain, own, 0.0, here)
        applied = flat(before[place] - after[place] for place in norms) / RATE
        decayed = applied - true
        weights = flat(before[place] for place in norms)
        errors.append(float(decayed @ weights / (weights @ weights)))
    return Found(tuple(abs(error) for error in errors), f"{len(norms)} norms decay at {errors[0]:.3f}, promised is 0")


@case
def pairs(watch: Watch, kind: str) -> Found:
    """One of TRL's trainers of pairs: four pairs in four micro-batches against the same four in one."""
    import datasets
    import trl

    words = [f"w{3 + place % 61}" for place in range(2 * 4 * STEPS * 9)]
    rows = [
        {
            "prompt": " ".join(words[9 * place : 9 * place + 3]),
            "chosen": " " + " ".join(words[9 * place + 3 : 9 * place + 6]),
            "rejected": " " + " ".join(words[9 * place + 6 : 9 * place + 9]),
        }
        for place in range(2 * 4 * STEPS)
    ]
    moved = []
    for accumulation, watched in ((4, watch), (1, Watch(watch.directory, None))):
        as_launched()
        steps: list[tuple[Any, Any]] = []
        model = llama()
        lengths = {"max_length": 32, "max_prompt_length": 16}
        arguments = arguments_of(
            watch.directory / str(accumulation),
            getattr(trl, f"{kind}Config"),
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=4 // accumulation,
            **lengths,
        )
        reference = {"ref_model": llama()} if kind == "DPO" else {}
        trainer = getattr(trl, f"{kind}Trainer")(
            model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=padded(tokenizer_of()),
            callbacks=[*watched.callbacks(), weights_at_steps(model, steps)],
            **reference,
        )
        trainer.train()
        moved.append(flat(steps[0][0]) - flat(steps[0][1]))
    return against(moved[:1], moved[1:], "the step of one micro-batch")


def padded(tokenizer: Any) -> Any:
    """With a padding token that is not the end's."""
    tokenizer.pad_token = "<pad>"
    return tokenizer


@case
def sft_labels(watch: Watch, chat: bool) -> Found:
    """TRL's SFT on texts: the share of rows whose end is trained, or (``chat``) that begin only once."""
    import datasets
    import trl

    as_launched()
    seen: list[tuple[Any, Any]] = []
    model = llama()
    model.register_forward_pre_hook(
        lambda _, __, given: seen.append((given["input_ids"].clone(), given["labels"].clone())), with_kwargs=True
    )
    count = 2 * 2 * 4 * STEPS
    texts = [" ".join(f"w{3 + (5 * place + word) % 61}" for word in range(4 + place % 7)) for place in range(count)]
    template = "{{ '<s>' }}{% for one in messages %}{{ ' ' + one['content'] }}{% endfor %}{{ ' </s>' }}"
    tokenizer = tokenizer_of(start=chat, template=template if chat else "")
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    tokenizer.pad_token = tokenizer.eos_token  # as TRL's own script did
    if chat:
        tokenizer = padded(tokenizer)
        halves = [(" ".join(text.split()[:2]), " ".join(text.split()[2:])) for text in texts]
        turns = [({"role": "user", "content": one}, {"role": "assistant", "content": two}) for one, two in halves]
        rows = [{"messages": list(turn)} for turn in turns]
    trainer = trl.SFTTrainer(
        model,
        arguments_of(watch.directory, trl.SFTConfig, max_length=64, remove_unused_columns=True),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=watch.callbacks(),
    )
    trainer.train()
    shares = []
    for step in range(STEPS):
        own = seen[4 * step : 4 * step + 4]
        if chat:
            wrong = [(inputs[:, :2] == 2).all(1).double().mean() for inputs, _ in own]
        else:
            wrong = [1 - (labels == EOS).any(1).double().mean() for _, labels in own]
        shares.append(float(mean_over_ranks(sum(wrong) / len(wrong))))
    said = "rows begin twice" if chat else "rows do not train their end"
    return Found(tuple(shares), f"{shares[0]:.0%} of the {said}")
