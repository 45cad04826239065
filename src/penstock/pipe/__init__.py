"""Brokers in a tree: where a broker stands in it, and what flows along its branches."""
