"""nemotron nano3 data prep: one file a stage."""
