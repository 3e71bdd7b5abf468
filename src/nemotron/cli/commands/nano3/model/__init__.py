"""nemotron nano3 model: models to and from Hugging Face."""
