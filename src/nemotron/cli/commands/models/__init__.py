"""nemotron models: look at architectures."""
