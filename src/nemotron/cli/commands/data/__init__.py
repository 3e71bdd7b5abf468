"""Commands that prepare data for any family."""
