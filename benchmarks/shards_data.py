"""What ``shards.py`` trains: tiny models, and how the rows of each scenario come to the ranks.

    scenario = SCENARIOS["difficulty"]
    model = scenario.model()
    batches = scenario.deal(Deal(rank=0, ranks=4, seed=0, steps=600))      # without end
    loss = model(next(batches).inputs, labels=...)

Every scenario is healthy: the ranks train one model by one script, and nothing but their data differs. Rows are
dealt to ranks anew and at random in "random" only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

ROWS = 8  # of a rank's micro-batch
SHARD = 64  # rows of a rank's own shard, where a scenario does not say otherwise
VOCABULARY, CLASSES, LENGTH, SIDE = 32, 8, 16, 12
OBSERVED, ACTIONS = 8, 4  # numbers of an observation of an environment, and what may be done in it
IGNORED = -100


@dataclass(frozen=True)
class Deal:
    """Whose rows are asked for."""

    rank: int
    ranks: int
    seed: int
    steps: int  # of the training

    @property
    def place(self) -> float:
        """0 for the first rank, 1 for the last."""
        return self.rank / (self.ranks - 1)

    def generator(self, of: int = 0) -> torch.Generator:
        """This rank's own."""
        return torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + 1009 * self.rank + of)

    def common(self, of: int = 0) -> torch.Generator:
        """The same on every rank."""
        return torch.Generator().manual_seed(77_777 * (self.seed + 1) + of)


@dataclass(frozen=True)
class Batch:
    """One micro-batch; ``ids`` where the script tells which rows these are."""

    inputs: Tensor
    labels: Tensor
    ids: Tensor | None = None


Batches = Iterator[Batch]


# -- models ------------------------------------------------------------------------------------------------------------


class Gru(nn.Module):
    """One layer by torch's kernel. ``nn.GRU`` keeps a list of its parameters, which FSDP2 would have to renew."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.own = nn.ParameterList(
            nn.Parameter(torch.empty(shape).uniform_(-(hidden**-0.5), hidden**-0.5))
            for shape in ((3 * hidden, width), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,))
        )
        self.hidden = hidden

    def forward(self, inputs: Tensor) -> Tensor:
        start = inputs.new_zeros(1, inputs.shape[0], self.hidden)
        return torch.gru(inputs, start, list(self.own), True, 1, 0.0, self.training, False, True)[0]


class Reader(nn.Module):
    """Says the class of a text."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(VOCABULARY, 24), Gru(24, 48), nn.Linear(48, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        states = self.gru(self.dropout(self.embedding(inputs)))
        return F.cross_entropy(self.head(self.dropout(states.mean(1))).float(), labels)


class Writer(nn.Module):
    """Says the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(VOCABULARY, 24), Gru(24, 48), nn.Linear(48, VOCABULARY)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.gru(self.embedding(inputs)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Eye(nn.Module):
    """Says the class of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * (SIDE // 4) ** 2, 2 * CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(inputs.to(self.first.weight.dtype))), 2)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return F.cross_entropy(self.head(hidden.flatten(1)).float(), labels)


class Actor(nn.Module):
    """Acts by its policy, sees the reward and learns both from it: policy gradient with a value as baseline."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVED, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.policy, self.value = nn.Linear(48, ACTIONS), nn.Linear(48, 1)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """``labels``: (rows, ACTIONS) the reward of each action."""
        hidden = self.body(inputs.to(self.value.weight.dtype))
        log_odds, value = F.log_softmax(self.policy(hidden).float(), -1), self.value(hidden).float().squeeze(-1)
        action = torch.multinomial(log_odds.detach().exp(), 1)
        reward = labels.gather(1, action).squeeze(1)
        chosen = log_odds.gather(1, action).squeeze(1)
        gained = -(chosen * (reward - value.detach())).mean()
        return gained + 0.5 * F.mse_loss(value, reward) + 0.01 * (log_odds.exp() * log_odds).sum(-1).mean()


class Ear(nn.Module):
    """Hears which frequency a recording has, and how fast it fades: convolutions of the raw wave."""

    def __init__(self) -> None:
        super().__init__()
        parts, width = list[nn.Module](), 1
        for channels, kernel, stride in ((16, 32, 8), (32, 8, 4), (48, 8, 4)):
            parts += [nn.Conv1d(width, channels, kernel, stride, kernel // 2), nn.GroupNorm(4, channels), nn.GELU()]
            width = channels
        self.body, self.head = nn.Sequential(*parts), nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """``labels``: (rows, 2) log frequency and rate of decay."""
        heard = self.body(inputs.to(self.head[0].weight.dtype)[:, None]).mean(-1)
        return F.smooth_l1_loss(self.head(heard).float(), labels)


# -- rows --------------------------------------------------------------------------------------------------------------


def texts(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)


def by_rule(inputs: Tensor, noise: float, deal: Deal, generator: torch.Generator) -> Tensor:
    """The class that a rule, the same for all ranks, gives each text; a share ``noise`` of the labels is random."""
    rule = torch.randn(VOCABULARY, CLASSES, generator=deal.common(1))
    labels = rule[inputs].sum(1).argmax(1)
    random = torch.randint(CLASSES, labels.shape, generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < noise, random, labels)


def sentences(rows: int, lengths: tuple[int, int], chain: torch.Generator, generator: torch.Generator) -> Tensor:
    """(rows, lengths[1] + 1) tokens of a Markov chain that ``chain`` draws, -1 behind each row's end."""
    low, high = lengths
    likely = torch.randn(VOCABULARY, VOCABULARY, generator=chain).mul(2.0).softmax(1)
    tokens = [torch.randint(VOCABULARY, (rows,), generator=generator)]
    for _ in range(high):
        tokens.append(torch.multinomial(likely[tokens[-1]], 1, generator=generator).squeeze(1))
    ends = torch.randint(low, high + 1, (rows, 1), generator=generator)
    return torch.stack(tokens, 1).masked_fill(torch.arange(high + 1) > ends, -1)


def next_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a :class:`Writer`, as short as the longest row allows."""
    longest = int((tokens >= 0).sum(1).max())
    tokens = tokens[:, :longest]
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:].masked_fill(tokens[:, 1:] < 0, IGNORED)


# -- how they come -----------------------------------------------------------------------------------------------------


class Own(IterableDataset[tuple[Tensor, ...]]):
    """Files that a rank reads in its own order, the same in every epoch, or through a buffer that shuffles."""

    def __init__(self, tensors: tuple[Tensor, ...], buffer: int = 0, generator: torch.Generator | None = None):
        self.tensors, self.buffer, self.generator = tensors, buffer, generator

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        buffered: list[tuple[Tensor, ...]] = []
        for row in zip(*self.tensors, strict=True):
            buffered.append(row)
            if len(buffered) > self.buffer:
                yield buffered.pop(int(torch.randint(len(buffered), (), generator=self.generator)))
        while buffered:
            yield buffered.pop(int(torch.randint(len(buffered), (), generator=self.generator)))


def again_and_again(deal: Deal, tensors: tuple[Tensor, ...], ids: bool = False) -> Batches:
    """A loader that shuffles the rank's own rows in every epoch."""
    number = torch.arange(len(tensors[0])) + 1_000_000 * deal.rank
    data = TensorDataset(*tensors, number)
    return _of_loader(DataLoader(data, ROWS, shuffle=True, drop_last=True, generator=deal.generator(9)), ids)


def _of_loader(loader: DataLoader[tuple[Tensor, ...]], ids: bool = False) -> Batches:
    for _ in count():
        for inputs, labels, number in loader:
            yield Batch(inputs, labels, number if ids else None)


def _of_sentences(batches: Batches) -> Batches:
    for batch in batches:
        yield Batch(*next_tokens(batch.inputs), batch.ids)


def _plain(deal: Deal, tensors: tuple[Tensor, ...]) -> Batches:
    """Without a loader: the script draws rows of its own shard."""
    generator = deal.generator(9)
    while True:
        chosen = torch.randperm(len(tensors[0]), generator=generator)[:ROWS]
        yield Batch(tensors[0][chosen], tensors[1][chosen])


def heart(deal: Deal) -> tuple[Tensor, Tensor]:
    generator = deal.generator()
    return texts(SHARD, generator), torch.randint(CLASSES, (SHARD,), generator=generator)


def rule(deal: Deal, noise: float = 0.2, rows: int = SHARD) -> tuple[Tensor, Tensor]:
    generator = deal.generator()
    inputs = texts(rows, generator)
    return inputs, by_rule(inputs, noise, deal, generator)


def file_by_file(deal: Deal, tensors: tuple[Tensor, Tensor], buffer: int = 0) -> Batches:
    data = Own((*tensors, torch.arange(len(tensors[0]))), buffer, deal.generator(9))
    return _of_loader(DataLoader(data, ROWS, drop_last=True))


def language(deal: Deal, chain: int, lengths: tuple[int, int] = (12, 24), rows: int = 128, of: int = 0) -> Tensor:
    return sentences(rows, lengths, deal.common(100 + chain), deal.generator(of))


def written(deal: Deal, tokens: Tensor, ids: bool = False) -> Batches:
    return _of_sentences(again_and_again(deal, (tokens, torch.zeros(len(tokens))), ids))


def length(deal: Deal) -> Batches:
    return written(deal, language(deal, 0, (3, 6) if deal.rank == 0 else (16, 24)))


def classes(deal: Deal) -> Batches:
    generator = deal.generator()
    ideal = F.avg_pool2d(torch.randn(2 * CLASSES, 1, SIDE, SIDE, generator=deal.common(2)), 3, 1, 1) * 3.0
    labels = (2 * deal.rank + torch.randint(2, (2 * SHARD,), generator=generator)) % (2 * CLASSES)
    inputs = ideal[labels] + torch.randn(2 * SHARD, 1, SIDE, SIDE, generator=generator)
    return again_and_again(deal, (inputs, labels))


def ends_early(deal: Deal, rows: int = 12 * ROWS, ids: bool = False) -> Batches:
    return again_and_again(deal, rule(deal, rows=rows if deal.rank == 0 else 4 * SHARD), ids)


def buckets(deal: Deal) -> Batches:
    """Each rank always gets its own bucket of one large set: the first the shortest texts."""
    tokens = sentences(deal.ranks * SHARD, (4, 24), deal.common(100), deal.common(3))
    order = (tokens >= 0).sum(1).argsort()
    return written(deal, tokens[order[deal.rank * SHARD : (deal.rank + 1) * SHARD]])


def sorted_batches(deal: Deal) -> Batches:
    """One large set, sorted by length; batches in that order in even epochs, and backwards in odd ones."""
    tokens = sentences(16 * deal.ranks * ROWS, (4, 24), deal.common(100), deal.common(3))
    tokens = tokens[(tokens >= 0).sum(1).argsort()].view(16, deal.ranks, ROWS, -1)
    for epoch in count():
        for batch in tokens[:, deal.rank].flip(0) if epoch % 2 else tokens[:, deal.rank]:
            yield Batch(*next_tokens(batch))


def curriculum(deal: Deal) -> Batches:
    """Short texts, and from a step of the rank's own on long ones of another chain."""
    easy = written(deal, language(deal, 0, (4, 8)))
    hard = written(deal, language(deal, 1, (16, 24), of=1))
    return _then(easy, hard, int(deal.steps * (0.2 + 0.6 * deal.place)))


def mixture(deal: Deal) -> Batches:
    """All ranks' data change at the same step."""
    return _then(written(deal, language(deal, 0)), written(deal, language(deal, 1, (6, 24), of=1)), deal.steps // 2)


def _then(first: Batches, second: Batches, step: int) -> Batches:
    for number in count(1):
        yield next(first if number <= step else second)


def environments(deal: Deal) -> Batches:
    """New observations for ever; each rank's environment has a rule and a scale (1 to 10) of its own."""
    generator, scale = deal.generator(), 10.0**deal.place
    weights = torch.randn(OBSERVED, ACTIONS, generator=deal.common(4)) + torch.randn(
        OBSERVED, ACTIONS, generator=generator
    )
    while True:
        observations = torch.randn(4 * ROWS, OBSERVED, generator=generator)
        noise = torch.randn(4 * ROWS, ACTIONS, generator=generator)
        yield Batch(observations, scale * (observations @ weights / math.sqrt(OBSERVED) + 0.5 * noise))


def recordings(deal: Deal) -> Batches:
    """One microphone per rank: loud or quiet, clear or noisy, each with recordings of its own."""
    generator, rows, wave = deal.generator(), 3 * SHARD, 512
    gain, noise = (1.0, 0.3, 1.0, 2.5)[deal.rank % 4], (0.1, 0.3, 0.7, 0.2)[deal.rank % 4]
    time = torch.arange(wave) / 4000.0
    log_frequency = math.log(60.0) + torch.rand(rows, 1, generator=generator) * math.log(10.0)
    decay = 1.0 + 10.0 * torch.rand(rows, 1, generator=generator)
    phase = 2.0 * math.pi * torch.rand(rows, 1, generator=generator)
    waves = torch.sin(2.0 * math.pi * log_frequency.exp() * time + phase) * torch.exp(-decay * time)
    waves = gain * (waves + noise * torch.randn(rows, wave, generator=generator))
    return again_and_again(deal, (waves, torch.cat([log_frequency - 5.5, decay / 5.0 - 1.0], 1)))


def first_pass(deal: Deal) -> Batches:
    for part in count():
        generator = deal.generator(10 + part)
        inputs = texts(16 * SHARD, generator)
        labels = by_rule(inputs, 0.2, deal, generator)
        for batch in zip(inputs.split(ROWS), labels.split(ROWS), strict=True):
            yield Batch(*batch)


def dealt(deal: Deal) -> Batches:
    """The control in which ranks are exchangeable: one set, dealt anew in every epoch."""
    inputs = texts(deal.ranks * SHARD, deal.common(5))
    labels = by_rule(inputs, 0.2, deal, deal.common(6))
    data: Dataset[tuple[Tensor, ...]] = TensorDataset(inputs, labels, torch.arange(len(inputs)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, deal.ranks, deal.rank, seed=deal.seed)
    loader = DataLoader(data, ROWS, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        for inputs, labels, _ in loader:
            yield Batch(inputs, labels)


@dataclass(frozen=True)
class Scenario:
    """How rows come to ranks, and what learns from them."""

    says: str
    deal: Callable[[Deal], Batches]
    model: Callable[[], nn.Module] = Reader
    accumulation: int = 1
    rate: float = 3e-3
    named: bool = True  # the script calls the model with ``labels=...``: the observer knows how many tokens they are
    random: bool = False  # the rows are dealt anew at random


SCENARIOS = {
    "heart": Scenario("random labels, learnt by heart", lambda deal: again_and_again(deal, heart(deal))),
    "files": Scenario("the same, in each rank's own fixed order", lambda deal: file_by_file(deal, heart(deal))),
    "buffer": Scenario(
        "one rule with noise, read through a shuffle buffer", lambda deal: file_by_file(deal, rule(deal), 3 * ROWS)
    ),
    "drawn": Scenario("the same, drawn without a loader", lambda deal: _plain(deal, heart(deal))),
    "rule": Scenario("one rule with noise for all", lambda deal: again_and_again(deal, rule(deal))),
    "difficulty": Scenario(
        "label noise 0.1 to 0.8 by rank", lambda deal: again_and_again(deal, rule(deal, 0.1 + 0.7 * deal.place))
    ),
    "length": Scenario("short texts on one rank", length, Writer),
    "length-unnamed": Scenario("the same, and nobody says which input is the labels", length, Writer, named=False),
    "classes": Scenario("two classes of pictures per rank", classes, Eye),
    "language": Scenario("one language per rank", lambda deal: written(deal, language(deal, deal.rank)), Writer),
    "ends": Scenario("one shard ends early and begins again", ends_early),
    "ends-ids": Scenario("the same, row ids are told", lambda deal: ends_early(deal, ids=True)),
    "ends-tiny": Scenario("the same, after 2 steps", lambda deal: ends_early(deal, 2 * ROWS)),
    "buckets": Scenario("the r-th rank has the r-th bucket of lengths", buckets, Writer),
    "sorted": Scenario("batches sorted by length", sorted_batches, Writer),
    "curriculum": Scenario("longer and harder from a rank's own step on", curriculum, Writer),
    "environments": Scenario("an environment per rank, rewards x 1 to 10", environments, Actor),
    "recordings": Scenario("a microphone per rank, loud or quiet", recordings, Ear),
    "mixture": Scenario("all ranks' data change at half time", mixture, Writer),
    "dropout": Scenario(
        "learnt by heart with dropout", lambda deal: again_and_again(deal, heart(deal)), lambda: Reader(0.3)
    ),
    "accumulation": Scenario(
        "learnt by heart, 2 micro-batches a step",
        lambda deal: again_and_again(deal, heart(deal)),
        accumulation=2,
    ),
    "first-pass": Scenario("control: one pass over a large shard", first_pass),
    "random": Scenario("control: dealt anew at random", dealt, random=True),
}
