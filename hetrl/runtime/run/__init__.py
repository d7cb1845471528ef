"""The processes of a run: controller, trainer ranks, rollout replicas, and how they come together."""
