"""The algorithms: samples, staleness, advantages, losses, one iteration of learning."""
