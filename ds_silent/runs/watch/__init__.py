"""``ds-silent watch``: a run looked at from a terminal while it trains, or by a script."""
