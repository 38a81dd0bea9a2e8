"""released_bugs.py: trainings in which rows are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from released_bugs_base import (
    RATE,
    SEED,
    VOCABULARY,
    Found,
    Watch,
    case,
)
from released_bugs_trainer import Collator, arguments_of, as_launched, llama


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows whose first token is their number."""
    import torch

    generator = torch.Generator().manual_seed(5)
    rest = torch.randint(0, VOCABULARY, (count, 7), generator=generator).tolist()
    return [{"input_ids": [place, *row], "labels": [place, *row]} for place, row in enumerate(rest)]


def missing(passes: Sequence[Sequence[int]], rows: int) -> tuple[float, ...]:
    """Per pass, the share of the rows that no rank trained on."""
    import torch
    import torch.distributed as dist

    shares = []
    for own in passes:
        held = torch.zeros(rows)
        held[list(own)] = 1
        dist.all_reduce(held)
        shares.append(float((held == 0).double().mean()))
    return tuple(shares)


@case
def last_window(watch: Watch) -> Found:
    """The Trainer, where a pass over the data ends in a short window: the rows of each pass that are not trained."""
    import transformers

    as_launched()
    passes: list[list[int]] = []
    model = llama()
    model.register_forward_pre_hook(
        lambda _, __, given: passes[-1].extend(given["input_ids"][:, 0].tolist()), with_kwargs=True
    )

    class Passes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            passes.append([])

    rows = 25
    arguments = arguments_of(watch.directory, max_steps=-1, num_train_epochs=3)
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=Collator(),
        train_dataset=numbered(rows),
        callbacks=[*watch.callbacks(), Passes()],
    )
    trainer.train()
    shares = missing(passes, rows)
    steps_a_pass = trainer.state.global_step // 3
    errors = tuple(share for share in shares for _ in range(steps_a_pass))
    return Found(errors, f"{round(shares[0] * rows)} of {rows} rows are not trained in the first pass")


@case
def continued(watch: Watch) -> Found:
    """accelerate, a pass broken off and continued by ``skip_first_batches``: the rows that it never trains."""
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    import ds_silent

    as_launched()
    rows, ways = 48, DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=ways)
    model = llama()
    torch.manual_seed(SEED)
    loader = torch.utils.data.DataLoader(numbered(rows), 4, shuffle=True, collate_fn=Collator())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), loader)
    observer = None
    if watch.block is not None:
        observer = ds_silent.attach(model, optimizer=optimizer, config=watch.block, loader=loader)
    passes: list[list[int]] = [[], []]

    def train(batch: dict[str, Any], own: list[int]) -> None:
        own.extend(batch["input_ids"][:, 0].tolist())
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    for batch in loader:
        train(batch, passes[0])
    for place, batch in enumerate(loader):
        if place == 3:
            break
        train(batch, passes[1])
    for batch in skip_first_batches(loader, 3):
        train(batch, passes[1])
    if observer is not None:
        observer.close()
    shares = missing(passes, rows)
    errors = (*[0.0] * 5, shares[0], *[0.0] * 5, shares[1])  # a row is left out once its pass is over
    return Found(errors, f"{round(shares[1] * rows)} of {rows} rows are not trained in the continued pass")


@case
def interleaved(watch: Watch) -> Found:
    """datasets' streams, split by rank and then interleaved: rows of a step that both ranks take."""
    import torch
    import torch.distributed as dist
    from datasets import Dataset, interleave_datasets
    from datasets.distributed import split_dataset_by_node
    from torch.nn.parallel import DistributedDataParallel

    import ds_silent

    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(SEED))
    stream = Dataset.from_dict({"x": rows.tolist(), "place": list(range(96))}).to_iterable_dataset(num_shards=1)
    own = split_dataset_by_node(stream, dist.get_rank(), 2)
    mixed = interleave_datasets([own], seed=SEED, probabilities=[1.0]).with_format("torch")
    torch.manual_seed(SEED)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    observer = None if watch.block is None else ds_silent.attach(model, optimizer=optimizer, config=watch.block)
    shares = []
    for step, batch in enumerate(torch.utils.data.DataLoader(mixed, 8)):
        if step == 4:
            break
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        optimizer.step()
        held = torch.zeros(96)
        held[batch["place"]] = 1.0
        dist.all_reduce(held)
        shares.append(float((held > 1).sum()) / 8)
    if observer is not None:
        observer.close()
    return Found(tuple(shares), f"{round(8 * shares[0])} of 8 rows of the first step are on both ranks")
