"""shoal: distributed training on PyTorch. One setting says how a run is spread; the result stays the same."""

__version__ = "0.1.0"
