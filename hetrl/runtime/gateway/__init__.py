"""The only process of a site that speaks to other sites, and the ways on which it reaches them."""
