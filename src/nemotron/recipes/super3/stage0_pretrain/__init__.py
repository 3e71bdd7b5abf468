"""Stage 0: pretraining data, the base model and its results."""
