"""nemotron super3 rl: reinforcement learning, one file a phase; `published.py` runs them in the published order."""
