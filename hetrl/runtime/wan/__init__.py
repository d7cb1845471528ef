"""Process groups of torch.distributed over several sites, and their store."""
