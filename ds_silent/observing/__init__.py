"""Observe a training: start together, take each step in the order of time, write what was gathered."""
