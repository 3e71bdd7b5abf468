"""nemotron nano2 eval: one file a stage."""
