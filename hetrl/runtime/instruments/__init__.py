"""Probe and profile, as they run on a node."""
