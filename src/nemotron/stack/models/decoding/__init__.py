"""Decoding: the cache, one step of every block, sampling, speculation."""
