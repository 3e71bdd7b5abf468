"""Serving a model to many at once: the engine, what it decodes with, and what speaks HTTP for it."""
