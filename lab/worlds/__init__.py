"""Worlds of ranks over sites of the lab: their gateways, and worlds in the middle of their work."""
