"""Change a training, where the configuration asks for it: no other room does."""
