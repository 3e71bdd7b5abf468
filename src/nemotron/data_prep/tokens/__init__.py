"""Text to Megatron token streams: plan the shards, tokenise each, put together what they wrote."""
