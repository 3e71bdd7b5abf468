"""Evaluation: pass@1 on verifiable tasks, bits per byte on text, and how sure one may be of either."""
