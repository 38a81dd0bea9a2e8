"""Read a gradient once: norm, sketch, checksum; by PyTorch's operations or one Triton kernel."""
