"""DeepSpeed from the inside: where ZeRO keeps its partitions, and what it cannot compute."""
