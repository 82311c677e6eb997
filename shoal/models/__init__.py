"""Models that shoal ships, as plain single-device PyTorch code without any distributed code."""
