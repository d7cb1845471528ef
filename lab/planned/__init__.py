"""Random legal plans, and their runs held against the plan on one device."""
