"""A collective that failed because of the others: they are gone, or nothing comes from them any more.

sentence = lost_peers(error)       # None: something else has failed
"""

from __future__ import annotations

_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused", "remote process")
_SILENT = ("timed out", "timeout", "no route to host", "network is unreachable")
_TRANSPORT = ("gloo", "nccl", "hccl", "hcom", "c10d", "tcpstore", "socket", "pair closure")


def lost_peers(error: BaseException) -> str | None:
    """What to tell of it: gloo, NCCL and HCCL raise a RuntimeError, and what it means is in its text only.

    Returns:
        the half of a sentence, with the transport's own words behind it; None where it is no such error.
    """
    text = " ".join(str(error).split())
    low = text.lower()
    if not isinstance(error, RuntimeError) or not any(word in low for word in _TRANSPORT):
        return None
    if any(words in low for words in _GONE):
        what = "another rank is gone"
    elif any(words in low for words in _SILENT):
        what = "nothing has come from another rank for as long as ranks wait"
    else:
        return None
    return f"{what} ({text.removeprefix('[').split('] ', 1)[-1].split('. ')[0][:160]})"
