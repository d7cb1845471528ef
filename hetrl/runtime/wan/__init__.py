"""Process groups of torch.distributed over several sites, their store, and the run group."""
