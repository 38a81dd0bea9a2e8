"""Rules that need no other rank: what a configuration, a framework or an optimizer's name promises, and what happens."""
