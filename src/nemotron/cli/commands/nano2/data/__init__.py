"""nemotron nano2 data: what the stages eat."""
