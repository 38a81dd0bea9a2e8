"""What one rank is made of, as a list of items to compare: weights, generators, sampler, hyper-parameters, code.

    before = weights_hash(model)                       # before the framework broadcasts rank 0's weights
    items = local_items(Training("torch", model, optimizer), sampler=sampler_facts(loader), before=before)

Nothing here communicates or raises: what cannot be read is an item that says so. The list's names depend on what all
ranks share (the model, how it is sharded); its values are the rank's own.

* Weights: equal where every rank holds a replica. A difference after the framework's broadcast is an error, one before
  it, which the broadcast hides, a warning: some rank loaded another checkpoint. Before, all may differ (each seeded
  from its rank), or none. Where parameters are in shards each number has one owner, and nothing is compared.
* Generators: *alike*. One seed everywhere is a policy (equal initialisation), a seed per rank is one too (other
  dropout masks, other augmentation). Some ranks equal and others not is neither; 2 ranks cannot tell the two apart.
  Where the model has dropout, the states of the generators that it draws from are *better different*: else every rank
  uses the same masks on other rows. The event, a note, comes when the first forward has really drawn the same numbers
  (:mod:`ds_silent.capture.settings_check`): scripts may seed later.
* Sampler: as many shares as ranks, each rank another one of the *same* permutation; nothing where it tells no shares.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import Subset

from ds_silent.device import initial_seed
from ds_silent.maths.fingerprint import Hash, hash_text, rng_hashes, short_hash, shown_hash, tensor_hash
from ds_silent.preflight.environment import code_items, environment_items
from ds_silent.preflight.items import SUBSET, Expectation, Group, Item, check_item, item_of
from ds_silent.preflight.settings import (
    PROBABILITIES,
    Numbers,
    groups_of,
    groups_with,
    holding_items,
    holdings_of,
    joined,
    module_hook_item,
)

_PICKED = 1024  # rows of a subset that are read
_HYPER_PARAMETERS = {"lr": "learning rate", "weight_decay": "weight decay", "betas": "betas", "eps": "eps"}


@dataclass(frozen=True)
class SamplerFacts:
    """How this rank's sampler cuts the data."""

    world_size: int  # shares that the data is cut into; 1 when every rank walks all of it
    rank: int  # the share that this rank takes
    permutation: Hash  # of the order of all rows, or of everything that it follows from
    seed: int | None = None
    rows: int | None = None  # of the data set
    picked: str = ""  # which they are, where that is known: see :func:`picked_from`


def _whole(tensor: Tensor) -> bool:
    return False


@dataclass(frozen=True)
class Training:
    """What a framework shows of one rank's training, before its first step."""

    framework: str  # its name
    module: nn.Module
    optimizer: Any  # with the framework's wrapper; None without one
    scheduler: Any = None  # of the learning rate
    config: Callable[[], list[Item]] = list  # items of what the user has configured
    sharded: Callable[[Tensor], bool] = _whole  # whether this rank holds a part of a tensor only
    shape: Callable[[Tensor], Sequence[int]] = attrgetter("shape")  # of the whole parameter
    packages: tuple[str, ...] = ()  # its own, whose versions are compared
    groups: Callable[[], Sequence[Sequence[Tensor]]] | None = None  # of the optimizers; None: of ``optimizer`` as it is


def local_items(
    training: Training,
    sampler: SamplerFacts | None = None,
    before: Hash | None = None,
    ranks: int = 1,
    environment: Mapping[str, str] = os.environ,
) -> list[Item]:
    """Everything that is compared, of this rank. Waits for the device once, for the hashes of the weights.

    Args:
        sampler: None when nobody knows; then free.
        before: :func:`weights_hash` of the model as the script made it; None when nobody looked.
        ranks: data-parallel ranks N, which the sampler must have shares for.
    """
    collected: list[tuple[Group, Callable[[], list[Item]]]] = [
        ("weights", lambda: weight_items(training, before)),
        ("parameters", lambda: parameter_items(training)),
        ("parameters", lambda: Numbers(training.module).items()),
        ("parameters", lambda: [module_hook_item(training.module)]),
        ("generators", lambda: generator_items(training.module)),
        ("sampler", lambda: sampler_items(sampler, ranks)),
        ("optimizer", lambda: optimizer_items(training.optimizer, training.scheduler, training.module)),
        ("optimizer", lambda: held_items(training)),
        ("config", training.config),
        ("code", lambda: code_items(training.packages)),
        ("environment", lambda: environment_items(environment)),
    ]
    items = []
    for group, collect in collected:
        try:
            items += collect()
        except Exception as error:  # on this rank alone: its list differs, which is an event
            items.append(item_of(f"{group} cannot be read", group, f"{type(error).__name__}: {error}"))
    return items


# -- the model -------------------------------------------------------------------------------------------------------


def weights_hash(module: nn.Module, sharded: Callable[[Tensor], bool] = _whole) -> Hash | None:
    """One hash of all parameters and buffers; None where some are in shards. Waits for the device once."""
    tensors = [tensor for _, tensor in _tensors_of(module)]
    if not tensors or any(map(sharded, tensors)):
        return None
    return hash_text(repr(_hashes_of(tensors)))


def weight_items(training: Training, before: Hash | None) -> list[Item]:
    """One item per parameter and buffer, named by its place so that lists of the same length can be compared."""
    named = [(name, tensor) for name, tensor in _tensors_of(training.module) if not training.sharded(tensor)]
    first = f"initial weights before {training.framework}'s broadcast"
    if before is None:
        items = [item_of(first, "weights", (0, 0), "not looked at", "free", "warning")]
    else:
        items = [item_of(first, "weights", before, None, "alike", "warning")]
    for index, ((name, tensor), own) in enumerate(zip(named, _hashes_of([tensor for _, tensor in named]), strict=True)):
        shown = f"{shown_hash(own)} ({name} {tuple(tensor.shape)})"
        items.append(item_of(f"initial weights [{index}]", "weights", own, shown))
    return items


def parameter_items(training: Training) -> list[Item]:
    """Which parameters there are, in which order, and which of them are trained."""
    module = training.module
    named = list(module.named_parameters())
    order = [f"{name} {tuple(training.shape(p))} {p.dtype}" for name, p in named]
    frozen = [name for name, p in named if not p.requires_grad]
    first = f" (first: {frozen[0]})" if frozen else ""
    sharded = sum(training.sharded(p) for _, p in named)
    note = f", {sharded} of them in shards (one owner per number: nothing to compare)" if sharded else ""
    return [
        item_of("parameter names, shapes and order", "parameters", "\n".join(order), f"{len(named)} parameters{note}"),
        item_of("trainable flags", "parameters", "\n".join(frozen), f"{len(frozen)} frozen{first}"),
        item_of("training mode", "parameters", str(module.training)),
    ]


def _hashes_of(tensors: Sequence[Tensor]) -> list[Hash]:
    """Hashes computed where the tensors are and fetched together, once per device."""
    hashes: list[Hash] = [(0, 0)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        members = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        fetched = torch.stack([tensor_hash(tensors[index]) for index in members]).tolist()
        for index, (low, high) in zip(members, fetched, strict=True):
            hashes[index] = (low, high)
    return hashes


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


# -- randomness and data ---------------------------------------------------------------------------------------------


def generator_items(module: nn.Module) -> list[Item]:
    """Seeds of torch and the device, and states of all generators: see the module docstring for ``alike``."""
    states = rng_hashes()
    found: dict[str, Hash | Callable[[], str]] = {
        "torch seed": lambda: str(torch.initial_seed()),
        "device seed": lambda: str(initial_seed()),
        **{f"{name} generator's state": state for name, state in states.items()},
    }
    items = [item_of(name, "generators", value, None, "alike", "warning") for name, value in found.items()]
    dropping, state = list(dropout_probabilities(module)), states["device"]
    shown = f"{shown_hash(state)} ({len(dropping)} modules with dropout, first: {dropping[0]})" if dropping else "none"
    expectation: Expectation = "better different" if dropping else "free"
    return [*items, item_of("dropout's masks", "generators", state, shown, expectation, "info")]


def dropout_probabilities(module: nn.Module) -> dict[str, float]:
    """The largest probability of each module that drops something, by its name.

    Those are torch's own, and modules that hand a probability to a function.
    """
    found = {}
    for name, inner in module.named_modules():
        own = [getattr(inner, "p", 0.0)] if isinstance(inner, _DropoutNd) else []
        held = [vars(inner).get(attribute, 0.0) for attribute in PROBABILITIES]  # getattr asks diffusers, which warns
        known = [float(p) for p in (*own, *held) if isinstance(p, (int, float)) and not isinstance(p, bool)]
        if drops := [p for p in known if 0.0 < p <= 1.0]:
            found[name or type(inner).__name__] = max(drops)
    return found


def sampler_items(facts: SamplerFacts | None, ranks: int) -> list[Item]:
    """Return what a sampler says of shares: one of N for each of N ranks, or the one share of rows of a rank's own."""
    if facts is None or (facts.world_size == 1 < ranks and facts.picked):
        own, expected = ("not known", "free") if facts is None else (facts.picked, "different")
        names = (": a share for each rank", "'s rows", "'s permutation")
        free = [item_of(f"sampler{name}", "sampler", "not known", None, "free") for name in names]
        return [*free, item_of("sampler's share", "sampler", own, None, cast(Expectation, expected))]
    shares = facts.world_size
    made = f"The sampler makes {shares} share{'s' * (shares != 1)} of the data for {ranks} rank{'s' * (ranks != 1)}"
    share = f"share {facts.rank} of {shares}"
    enough, taken, exists = shares >= ranks, shares <= ranks, 0 <= facts.rank < shares
    twice = made + ("" if enough else ": rows are taken more than once")
    never = made + ("" if taken else ": some are taken by nobody")
    place = f"The sampler takes {share}, counted from 0" + ("" if exists else ": there is no such share")
    return [
        check_item("sampler: a share for each rank", "sampler", enough, twice),
        check_item("sampler: a rank for each share", "sampler", taken, never, "warning"),
        check_item("sampler: a share that exists", "sampler", exists, place),
        item_of("sampler's share", "sampler", share, None, "different"),
        item_of("sampler's rows", "sampler", str(facts.rows)),
        item_of("sampler's seed", "sampler", str(facts.seed)),
        item_of("sampler's permutation", "sampler", facts.permutation),
        item_of(SUBSET, "sampler", (shares == ranks and facts.picked) or "none"),
    ]


def sampler_facts(loader: Any) -> SamplerFacts | None:
    """What a DataLoader, a loader around one or a sampler says of its sharding; None when it says nothing.

    Relies on ``num_replicas``, ``rank``, ``seed``, ``epoch`` of ``torch.utils.data.DistributedSampler``, and on
    ``num_processes`` and ``process_index`` of accelerate's shards, in which its ``SeedableRandomSampler`` (with an
    ``initial_seed``) holds the data. A sampler of one's own is read by the names of torch's.
    """
    samplers, pairs = samplers_in(loader), (("num_replicas", "rank"), ("num_processes", "process_index"))
    said = [(n, getattr(one, a, None), getattr(one, b, None)) for n, one in enumerate(samplers) for a, b in pairs]
    cuts = [(n, shares, share) for n, shares, share in said if isinstance(shares, int) and isinstance(share, int)]
    if not cuts:
        return None
    place, shares, share = cuts[0]
    if hasattr(samplers[place], "process_index") and len(cuts) > 1:  # accelerate cuts what another has cut
        shares, share = shares * cuts[1][1], share * cuts[1][1] + cuts[1][2]
    return _facts_of(samplers[place:], shares, share)


def _facts_of(within: Sequence[Any], world_size: int, rank: int) -> SamplerFacts:
    """``within``: the sampler that says of shares, and those in it."""
    sets = [getattr(one, name, None) for one in within for name in ("dataset", "data_source")]
    rows = next((length for length in map(length_of, sets) if length is not None), None)
    said = [getattr(one, name, None) for one in within for name in ("seed", "initial_seed")]
    names = ("seed", "initial_seed", "epoch", "shuffle", "drop_last", "even_batches", "split_batches")
    follows = [[getattr(one, name, None) for name in names] for one in within]
    permutation = hash_text(repr(([type(one).__name__ for one in within], rows, follows)))
    seed = next((one for one in said if isinstance(one, int)), None)
    picked = next(filter(None, map(picked_from, sets)), "")
    return SamplerFacts(world_size, rank, permutation, seed, rows, picked)


def samplers_in(loader: Any) -> list[Any]:
    """The loader, and all loaders and samplers in it, from the outside to the inside.

    A DataLoader of a batch sampler has a ``sampler`` too, which nobody asks: so that comes last.
    """
    found: list[Any] = []
    waiting = [loader]
    while waiting and len(found) < 8:
        one = waiting.pop(0)
        if one is not None and not any(one is other for other in found):
            found.append(one)
            names = ("data_sampler", "batch_sampler", "sampler", "dataloader", "_index_sampler")
            waiting = [*(getattr(one, name, None) for name in names), *waiting]
    return found


@dataclass
class LoaderPass:
    """What one pass of a loader deals to this rank: batches, and rows of the data in each; None: not known."""

    batch: int | None
    batches: int | None
    rows: int | None  # of the pass
    given: int = 0  # batches so far
    data: float = 0.0  # hash of the data set, if the pass takes each of its rows once; 0: not known
    first: Sequence[Any] = ()  # indices that were drawn

    def rows_in(self, batches: int) -> int:
        """Return the rows of so many batches; the last one may be smaller."""
        rows = (self.batch or 0) * max(0, batches)
        return rows if self.rows is None else min(rows, self.rows)


def loader_pass_of(iterator: Any) -> LoaderPass:
    """Read how many rows an iterator's batches hold. A data set that makes batches itself gives one item at a time."""
    try:
        sampler = getattr(iterator, "_index_sampler", None)
        alone = getattr(iterator, "_auto_collation", True) is False
        inner = sampler if alone else getattr(sampler, "sampler", None)
        return LoaderPass(1 if alone else rows_per_batch(iterator), length_of(sampler), length_of(inner))
    except Exception:  # somebody else's property
        return LoaderPass(None, None, None)


def rows_per_batch(loader: Any) -> int | None:
    """Count the rows that a loader, its iterator or its batch sampler gives a rank at once; None if it does not say."""
    held = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "_index_sampler", None))
    for one in held:
        if isinstance(size := getattr(one, "batch_size", None), int):
            parts = getattr(one, "num_processes", 1) if getattr(one, "split_batches", False) is True else 1
            return size // parts if isinstance(parts, int) and parts > 0 else None  # accelerate's shard splits each
    return None


def picked_from(data: Any) -> str:
    """Say which rows torch's ``Subset`` picks, down to the data set that it picks from; "" where it picks none.

    Of many rows some are read, evenly.
    """
    told: list[str] = []
    while isinstance(data, Subset) and len(told) < 4:
        picked: Any = data.indices
        some = [int(one) for one in picked[:: max(1, len(picked) // _PICKED)]]
        of, begin = length_of(data.dataset), ", ".join(map(str, some[:3]))
        told.append(f"{len(picked)} of {'many' if of is None else of} rows, first {begin} [{short_hash(some):.0f}]")
        data = data.dataset
    return "; ".join(told)


def length_of(data: Any) -> int | None:
    """Rows of a data set; None where it does not know."""
    try:
        return len(data)
    except Exception:  # whatever somebody else's data set raises
        return None


# -- hyper-parameters and configuration ------------------------------------------------------------------------------


def optimizer_items(optimizer: Any, scheduler: Any, module: Any) -> list[Item]:
    """Class and hyper-parameters, over the groups of the module's parameters; class and state of the scheduler."""
    own = {id(parameter) for parameter in module.parameters()}
    groups = groups_with([] if optimizer is None else getattr(optimizer, "param_groups", []), own)
    inner = getattr(optimizer, "optimizer", optimizer)  # what a framework wraps
    around = "" if inner is optimizer else f" around {type(inner).__name__}"
    kinds = "none" if optimizer is None else f"{type(optimizer).__name__}{around}"

    def values_of(key: str) -> Callable[[], str]:
        return lambda: joined([_plain(group[key]) for group in groups if key in group])

    def others() -> str:
        known = {*_HYPER_PARAMETERS, "params"}
        return json.dumps([{k: _plain(v) for k, v in sorted(g.items()) if k not in known} for g in groups])

    def schedule() -> str:
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
        return f"{type(scheduler).__name__} {json.dumps({k: _plain(v) for k, v in sorted(state.items())})}"

    return [
        item_of("optimizer", "optimizer", kinds),
        *(item_of(name, "optimizer", values_of(key)) for key, name in _HYPER_PARAMETERS.items()),
        item_of("other hyper-parameters", "optimizer", others),
        item_of("learning-rate scheduler", "optimizer", schedule),
    ]


def held_items(training: Training) -> list[Item]:
    """Which of the model's parameters each group of the optimizers holds, by layer."""
    named = list(training.module.named_parameters())
    groups = groups_of([training.optimizer]) if training.groups is None else training.groups()
    holdings = holdings_of(groups, {id(p): name for name, p in named})
    return holding_items(holdings, [name for name, _ in named])


def config_item(name: str, value: Any) -> Item:
    """A part of a configuration, without local paths."""
    return item_of(name, "config", json.dumps(_portable(value), sort_keys=True, default=str))


def _portable(value: Any) -> Any:
    if isinstance(value, Mapping):
        own = re.compile(r"(_path|_dir|_file)$")
        return {str(key): _portable(inner) for key, inner in value.items() if not own.search(str(key))}
    return [_portable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """A JSON value that stands for a hyper-parameter."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 16 else f"tensor {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
