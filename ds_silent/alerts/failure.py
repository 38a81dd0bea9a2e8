"""Say why an alert could not be sent, and print another library's log, without a secret."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ds_silent.destination import is_secret, masked


class NotSent(Exception):
    """The message is a few words of ours, never a library's: those may quote an address or a password.

    Attributes:
        again: whether a repetition may help.
        after: seconds that the server has asked to be left alone; None where it has not.
    """

    def __init__(self, why: str, *, again: bool = True, after: float | None = None):
        super().__init__(why)
        self.again, self.after = again, after


def why_of(error: BaseException) -> str:
    """Of a foreign error what cannot hold a secret: its type, and the operating system's word for its number."""
    words = ""
    if isinstance(error, OSError) and error.errno is not None and error.strerror == os.strerror(error.errno):
        words = f" ({error.strerror})"
    return f"{type(error).__name__}{words}"


# ----------------------------------------------------------------------------------------------------------------------
# Another library's log, without the secrets of a block that it prints.


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
