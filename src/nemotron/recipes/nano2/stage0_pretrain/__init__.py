"""Stage 0: text, the base model, its bits per byte."""
