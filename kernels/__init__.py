"""The operations of V4, one a file: the fast path beside its plain PyTorch reference."""
