"""nemotron nano2 compress: one file an algorithm."""
