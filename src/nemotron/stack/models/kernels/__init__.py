"""Faster forms of what plain PyTorch computes slowly: CUDA kernels, oneDNN matmuls, a convolution with its gradient."""
