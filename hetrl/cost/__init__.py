"""The cost model: seconds, bytes and memory of a plan, from exact counts and calibrated efficiencies."""
