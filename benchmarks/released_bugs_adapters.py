"""released_bugs.py: adapters of peft, pairs of TRL, loaded weights, and a loss that has weights of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from released_bugs_base import EOS, RATE, SEED, STEPS, VOCABULARY, Found, Watch, case, flat
from released_bugs_trainer import arguments_of, as_launched, llama, padded, tokenizer_of, uneven_rows


@case
def scaled_adapters(watch: Watch) -> Found:
    """LoRA with patterns: each adapter's factor against alpha / r of its own pattern, 64 / 8."""
    import peft
    import transformers

    as_launched()
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"self_attn.q_proj": 64}}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **patterns)
    model = peft.get_peft_model(llama(), config)
    factors = {one.scaling["default"] for name, one in model.named_modules() if name.endswith("self_attn.q_proj")}
    rows = [{**row, "input_ids": row["input_ids"][:4], "labels": row["labels"][:4]} for row in uneven_rows(96, False)]
    collator = transformers.default_data_collator
    arguments = arguments_of(watch.directory)
    transformers.Trainer(
        model, arguments, train_dataset=rows, data_collator=collator, callbacks=watch.callbacks()
    ).train()
    (factor,) = factors
    return Found((abs(factor / 8 - 1),) * STEPS, f"adapters are scaled by {factor:g}, promised is 8")


def _train_on_noise(watch: Watch, model: Any, rate: float) -> None:
    """A few steps of plain SGD under DistributedDataParallel, on each rank's own (4, 8) rows."""
    import torch
    import torch.distributed as dist

    import ds_silent

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)
    observer = None if watch.block is None else ds_silent.attach(wrapped, optimizer=optimizer, config=watch.block)
    torch.manual_seed(SEED + dist.get_rank())
    for _ in range(STEPS):
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if observer is not None:
        observer.close()


@case
def moved_adapters(watch: Watch) -> Found:
    """LoRA in two of four layers, each of four experts: the share of the adapters that are in other layers."""
    import peft
    import torch
    from torch import nn

    as_launched()
    torch.manual_seed(SEED)
    of_layer = [[nn.ModuleDict({"up": nn.Linear(8, 8)}) for _ in range(4)] for _ in range(4)]
    layers = [nn.ModuleDict({"experts": nn.ModuleList(experts)}) for experts in of_layer]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"layers": nn.ModuleList(layers)})

        def forward(self, rows: Any) -> Any:
            for layer in self.model["layers"]:
                rows = rows + sum(expert["up"](rows).tanh() for expert in layer["experts"])
            return rows

    config = peft.LoraConfig(r=2, target_modules=["up"], layers_to_transform=[2, 3])
    model = peft.get_peft_model(Experts(), config)
    held = [name.split("layers.")[1] for name, one in model.named_modules() if getattr(one, "lora_A", None)]
    _train_on_noise(watch, model, 0.01)
    moved = [name for name in held if name[0] not in "23"]
    return Found((len(moved) / len(held),) * STEPS, f"{len(moved)} of {len(held)} adapters are in other layers")


@case
def unattended(watch: Watch) -> Found:
    """TRL's DPO that keeps the end of long rows: the share of each step's rows of which no token is attended."""
    import datasets
    import trl

    as_launched()
    drawn = random.Random(SEED)
    rows = [
        {
            name: " " + " ".join(f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(drawn.choice(words)))
            for name, words in (("prompt", [4]), ("chosen", [2, 3, 40]), ("rejected", [2, 3, 40]))
        }
        for _ in range(2 * 8 * STEPS)
    ]
    model, masks = llama(), []
    model.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)
    lengths = {"max_length": 20, "max_prompt_length": 16, "max_completion_length": None, "truncation_mode": "keep_end"}
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    arguments = arguments_of(watch.directory, trl.DPOConfig, **lengths, **batches)
    trl.DPOTrainer(
        model,
        ref_model=llama(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=padded(tokenizer_of()),
        callbacks=watch.callbacks(),
    ).train()
    empty = [float((mask.sum(1) == 0).float().mean()) for mask in masks]
    return Found(tuple(empty), f"{empty[0]:.0%} of the first step's rows have no token")


@case
def ended_twice(watch: Watch) -> Found:
    """TRL's DPO on chats whose template ends them: the share of each step's rows that end in two end tokens."""
    import datasets
    import trl

    as_launched()
    drawn = random.Random(SEED)

    def turn(role: str, words: int) -> list[dict[str, str]]:
        said = " ".join(f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(words))
        return [{"role": role, "content": said}]

    rows = [
        {"prompt": turn("user", 4), "chosen": turn("assistant", 3), "rejected": turn("assistant", 5)}
        for _ in range(2 * 8 * STEPS)
    ]
    template = "{{ '<s>' }}{% for one in messages %}{{ ' ' + one['content'] + ' </s>' }}{% endfor %}"
    model, ends = llama(), []

    def look(_: Any, placed: Any, given: dict[str, Any]) -> None:
        ids = placed[0] if placed else given["input_ids"]
        pairs = zip(ids.tolist(), given["attention_mask"].tolist(), strict=True)
        attended = [[token for token, shown in zip(*row, strict=True) if shown] for row in pairs]
        ends.append(sum(row[-2:] == [EOS, EOS] for row in attended) / len(attended))

    model.register_forward_pre_hook(look, with_kwargs=True)
    arguments = arguments_of(
        watch.directory, trl.DPOConfig, max_length=32, per_device_train_batch_size=8, gradient_accumulation_steps=1
    )
    trl.DPOTrainer(
        model,
        ref_model=llama(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=padded(tokenizer_of(template=template)),
        callbacks=watch.callbacks(),
    ).train()
    return Found(tuple(ends), f"{ends[0]:.0%} of the first step's rows end twice")


@case
def kept_weights(watch: Watch) -> Found:
    """A script's own class of transformers' models: how far what ``from_pretrained`` gives is from what was saved."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch import nn

    from ds_silent.patches import Patches
    from ds_silent.rules.loads import watch_loads

    class Own(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.BertConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.up = nn.Linear(8, 8)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0.0, 0.02)
                module.bias.data.zero_()

        def forward(self, rows: Any) -> Any:
            return self.up(rows)

    as_launched()
    patches, folder = Patches(), _of_rank_0(watch.directory)
    if watch.block is not None:
        watch_loads(patches)  # as `python -m ds_silent` does before a script begins
    torch.manual_seed(SEED)
    saved = Own(transformers.BertConfig())
    with torch.no_grad():
        saved.up.weight.add_(1.0)
        saved.up.bias.add_(1.0)
    if dist.get_rank() == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    model = Own.from_pretrained(folder)
    error = float((flat(model.parameters()) - flat(saved.parameters())).norm() / flat(saved.parameters()).norm())
    _train_on_noise(watch, model, RATE)
    patches.undo()
    return Found((error,) * STEPS, f"the loaded weights are {error:.3g} of their length off")


@case
def own_classifier(watch: Watch) -> Found:
    """SoftmaxLoss of sentence-transformers: how far the ranks' classifiers are apart, against their length."""
    import datasets
    import torch
    import torch.distributed as dist
    import transformers
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
    from sentence_transformers.training_args import SentenceTransformerTrainingArguments

    as_launched()
    drawn, apart = random.Random(SEED), []
    model = SentenceTransformer(modules=_encoder(watch.directory, models), device="cpu")
    loss = losses.SoftmaxLoss(model, sentence_embedding_dimension=16, num_labels=3)

    class Apart(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            weight = loss.classifier.weight.detach()
            of_ranks = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(of_ranks, weight)
            apart.append(float((of_ranks[0] - of_ranks[1]).norm() / weight.norm()))

    words = [" ".join(f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(6)) for _ in range(2 * 2 * 4 * STEPS)]
    rows = {"a": words[::2], "b": words[1::2], "label": [drawn.randrange(3) for _ in words[::2]]}
    arguments = arguments_of(watch.directory, SentenceTransformerTrainingArguments, gradient_accumulation_steps=1)
    SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        loss=loss,
        callbacks=[*watch.callbacks(), Apart()],
    ).train()
    return Found(tuple(apart), f"the ranks' classifiers are {apart[0]:.3g} of their length apart")


def _of_rank_0(directory: Path) -> str:
    """A folder for a model, rank 0's: transformers writes it on one rank alone."""
    return str(directory.parent.parent / "0" / directory.name / "model")


def _encoder(directory: Path, models: Any) -> list[Any]:
    """A tiny BERT by way of a folder."""
    import torch
    import torch.distributed as dist
    import transformers

    folder = _of_rank_0(directory)
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **sizes, hidden_dropout_prob=0.0)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    padded(tokenizer_of()).save_pretrained(folder)
    dist.barrier()
    return [models.Transformer(folder, max_seq_length=16), models.Pooling(16)]
