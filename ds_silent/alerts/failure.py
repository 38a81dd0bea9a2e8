"""Why an alert could not be sent, in words that hold no secret."""

from __future__ import annotations

import os


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
