"""Answers to single questions: how fast is it, does it fit, what binds."""
