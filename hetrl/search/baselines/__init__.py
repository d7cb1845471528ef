"""Plans as other systems make them, for comparison."""
