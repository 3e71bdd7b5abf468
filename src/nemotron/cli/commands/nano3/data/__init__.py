"""nemotron nano3 data: what the stages eat."""
