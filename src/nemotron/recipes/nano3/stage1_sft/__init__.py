"""Stage 1: conversations, the tuned model and its results."""
