"""Stage 1: conversations, the model that answers, its score."""
