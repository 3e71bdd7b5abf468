"""Where plain PyTorch is slow: CUDA kernels where installed, oneDNN matmuls, a convolution with its own gradient."""
