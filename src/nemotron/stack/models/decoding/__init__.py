"""Decoding: the cache, one token through every block, sampling, several tokens at once, speculative decoding."""
