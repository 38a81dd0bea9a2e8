"""Text that comes from outside: names of layers, files, hosts, values of a configuration."""

from __future__ import annotations


def one_line(text: str) -> str:
    """``text`` with a blank for whatever could begin a line or a header, or move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
