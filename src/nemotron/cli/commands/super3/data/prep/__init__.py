"""nemotron super3 data prep: one file a stage."""
