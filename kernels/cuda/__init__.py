"""CUDA kernels: sources, their compilation without a GPU, and the two back ends that run them."""
