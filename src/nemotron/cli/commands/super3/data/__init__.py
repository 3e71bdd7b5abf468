"""nemotron super3 data: what the stages eat."""
