"""Ways in through other libraries' own extension points; each is imported only where it is used."""

BLOCK_FILE = "SILENT_CONSISTENCY_CONFIG"
"""In the environment: the file that holds the block, alone or under its name."""
