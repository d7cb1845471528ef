"""Prompts, chat templates, and rewards by rule."""
