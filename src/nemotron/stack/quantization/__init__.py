"""Few bits, emulated in plain PyTorch: training in FP8 and NVFP4, and the formats, scales and files of finished models.

What is emulated and what is not: docs/architecture/quantization.md.
"""
