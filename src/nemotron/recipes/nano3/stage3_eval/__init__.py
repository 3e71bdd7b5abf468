"""Stage 3: what every stage has reached."""
