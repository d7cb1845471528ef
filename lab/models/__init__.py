"""Models that this project trains for its own examples."""
