"""Hostile clients for every door of a real server, and the oracle that says whether anyone else noticed them."""
