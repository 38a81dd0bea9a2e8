"""What an observer does while a training runs: one step in the order of time, and what becomes of what it gathered."""
