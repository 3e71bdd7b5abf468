"""Text to Megatron token streams."""
