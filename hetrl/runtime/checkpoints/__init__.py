"""Checkpoints as files: written whole or not at all, kept, proven, copied to another site."""
