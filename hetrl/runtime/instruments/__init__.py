"""Probe, profile and the look of doctor, as they run on a node."""
