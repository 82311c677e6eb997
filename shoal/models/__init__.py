"""Models that shoal ships: plain single-device PyTorch that knows nothing of ranks."""
