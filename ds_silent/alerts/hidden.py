"""Another library's log, without the secrets of a block that it prints.

with hidden(deepspeed_logger, find_block(ds_config)):
    deepspeed.initialize(config=ds_config)       # logs the whole configuration
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ds_silent.destination import is_secret, masked


@contextmanager
def hidden(logger: logging.Logger, block: Mapping[str, Any] | None) -> Iterator[None]:
    """While it lasts, what ``logger`` logs shows the addresses of the block's ``alerts`` masked."""
    texts = [] if block is None else [text for text in _texts(block.get("alerts")) if is_secret(text)]
    if not texts:
        yield
        return
    shown = {form: masked(text) for text in texts for form in (text, json.dumps(text)[1:-1])}
    longest_first = sorted(shown, key=len, reverse=True)  # one may be the beginning of another

    def without(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        for text in longest_first:
            message = message.replace(text, shown[text])
        record.msg, record.args = message, None
        return True

    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)


def _texts(value: Any) -> Iterator[str]:
    """Every text in what should be a list of objects, but for their levels."""
    if isinstance(value, str) and len(value) > len("warning"):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
