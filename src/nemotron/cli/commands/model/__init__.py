"""nemotron FAMILY model: models to and from Hugging Face, the same for every family."""
