"""Triton kernels for GPUs. The same source runs in Triton's interpreter on a CPU, where it is tested."""
