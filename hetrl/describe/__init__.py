"""What people write and machines measure: experiments, sites, inventories, links, read and validated."""
