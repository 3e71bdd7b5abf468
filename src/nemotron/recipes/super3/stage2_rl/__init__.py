"""Stage 2: reinforcement learning, and the healing of multi-token prediction after it."""
