"""Stage 2: reinforcement learning with verifiable rewards."""
