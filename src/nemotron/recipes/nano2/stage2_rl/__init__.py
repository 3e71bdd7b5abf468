"""Stage 2: instructions, tools, preferences: the model that is aligned, its score."""
