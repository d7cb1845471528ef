"""Acts on the clusters: submit a run, watch it, end it."""
