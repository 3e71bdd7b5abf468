"""nemotron nano2 data prep: one file a stage."""
