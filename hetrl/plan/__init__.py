"""The plan: the contract between planner, launcher and runtime."""
