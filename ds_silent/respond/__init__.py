"""The only code that changes a training, and only where the configuration asks for it."""
