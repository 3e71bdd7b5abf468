"""Reinforcement learning from verifiable rewards: rollouts, advantages and the GRPO loss."""
