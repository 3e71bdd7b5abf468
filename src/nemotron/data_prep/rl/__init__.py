"""Prompts of reinforcement learning: NeMo Gym records, and published prompts with placeholders filled."""
