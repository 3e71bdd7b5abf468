"""Chat formats, each one twice: as a Jinja template for inference engines, and as Python that also knows the mask."""
