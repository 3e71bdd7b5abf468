"""The embedded stack: what the NVIDIA stack does at scale, in plain PyTorch small enough to read."""
