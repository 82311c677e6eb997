"""Tensor and sequence parallelism: the ranks of a group share the work of each layer."""
