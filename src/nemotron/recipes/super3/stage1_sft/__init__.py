"""Stage 1: configs of the conversations and of the tuned model, for the scripts of nano3."""
