"""Nemotron 3 Nano: pretraining, SFT, RL, evaluation; one folder a stage, one script a step."""
