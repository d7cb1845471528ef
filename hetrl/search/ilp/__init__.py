"""The integer program over group columns."""
