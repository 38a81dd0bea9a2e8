"""What no framework's training can have observed is refused with a sentence, the same on every rank."""

from __future__ import annotations

from torch import nn

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.extras import installed, missing_sentence

EXACT_RANKS = 1024
"""Up to which all pairs of ranks are compared exactly. Every rank reduces the matrix of all pairs at every measurement:
4 MiB there, 32 times a sketch and as much as all else that is sent together; 64 MiB at 4,096 ranks, 1 GiB at 16,384."""


def refuse_too_few_ranks(config: SilentConsistencyConfig, ranks: int) -> None:
    """Raise :class:`ConfigError` where two ranks would have to outvote each other."""
    if config.respond.on_replica_drift == "majority" and ranks < 3:
        raise ConfigError(
            f'{BLOCK}.respond.on_replica_drift "majority" needs at least 3 ranks to outvote one, got {ranks}; use '
            '"mean" or "stop"'
        )


def refuse_too_many_ranks(config: SilentConsistencyConfig, ranks: int) -> None:
    """Raise :class:`ConfigError` where the exact comparison would cost more than it can tell."""
    direction = config.direction
    checked = direction.method == "sketch" and direction.exact_interval > 0
    if ranks <= EXACT_RANKS or not (checked or direction.method == "exact"):
        return
    key, remedy = (
        ('method "exact"', 'use "sketch"')
        if direction.method == "exact"
        else (f"exact_interval {direction.exact_interval}", "set it to 0")
    )
    raise ConfigError(
        f"{BLOCK}.direction.{key} needs at most {EXACT_RANKS} ranks, got {ranks}: the matrix of all pairs would be "
        f"{4 * ranks * ranks / 1e6:,.0f} MB that every rank reduces at every measurement; {remedy}"
    )


def refuse_metrics_without_library(config: SilentConsistencyConfig) -> None:
    """Raise :class:`ConfigError` where metrics are to be served and prometheus_client is not there. Writing rank."""
    if config.metrics_port and not installed("prometheus_client"):
        what = f"{BLOCK}.metrics_port {config.metrics_port}"
        raise ConfigError(f"{missing_sentence(what, ['prometheus_client'], 'prometheus')} on the host of rank 0")


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Modules made with ``sparse=True`` (``torch.nn.Embedding``, ``EmbeddingBag``): some rows only have a gradient."""
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if getattr(module, "sparse", False) is True and any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"silent_consistency cannot observe {name or 'the model'} ({type(module).__name__} with sparse=True), "
                "because its gradient holds only some rows; make it with sparse=False, freeze it, or set "
                '"silent_consistency": {"enabled": false}'
            )
