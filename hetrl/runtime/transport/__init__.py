"""Exactly once, in order and encrypted between two members of a run."""
