"""Exchange, by one collective per measured step, what each rank knows; all know it one step later."""
