"""Agree and communicate across ranks, also where one of them fails."""
