"""Prompts of reinforcement learning: NeMo Gym records, and blends with placeholders filled."""
