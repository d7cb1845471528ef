"""Slurm sites: what is asked, rendered, submitted, watched and ended there."""
