"""Checkpoints as files: written whole or not at all, listed, kept, copied to another site."""
