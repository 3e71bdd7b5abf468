"""Training in few bits, emulated in plain PyTorch: every value that a GPU would multiply in FP8 is rounded to FP8 here.

What is emulated and what is not: docs/architecture/quantization.md.
"""
