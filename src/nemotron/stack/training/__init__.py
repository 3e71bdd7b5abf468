"""Pieces of a training loop: optimiser groups, schedules, losses, loaders, checkpoints, signals, FLOPs.

None of them owns the loop. The loop stands in the recipe script, where it can be read and changed.
"""
