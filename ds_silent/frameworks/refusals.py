"""What no framework's training can have observed is refused with a sentence, the same on every rank."""

from __future__ import annotations

from torch import nn

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig


def refuse_too_few_ranks(config: SilentConsistencyConfig, ranks: int) -> None:
    """Raise :class:`ConfigError` where two ranks would have to outvote each other."""
    if config.respond.on_replica_drift == "majority" and ranks < 3:
        raise ConfigError(
            f'{BLOCK}.respond.on_replica_drift "majority" needs at least 3 ranks to outvote one, got {ranks}; use '
            '"mean" or "stop"'
        )


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
