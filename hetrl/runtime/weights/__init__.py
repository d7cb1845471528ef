"""Weight versions on their way from a trainer to the replicas, and a model's directory."""
