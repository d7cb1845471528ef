"""Engines that compute nothing: they wait as long as the cost model says, and send what would cross between sites."""
