"""Python faces of the kernels in `csrc`: ctypes only, no torch."""
