"""Stage 3: a smaller model out of the trained one, by pruning and distillation."""
