"""Slurm through NeMo-Run: submit, stay attached, behind SSH."""
