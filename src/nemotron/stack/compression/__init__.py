"""Minitron: a smaller model out of a trained one. `importance` → `search` → `pruning` → `distillation`."""
