"""nemotron artifacts: look at what runs have published."""
