"""Rules that need no other rank: what a configuration, a framework or an optimizer promises, and what happens."""
