"""How a model is split: sharding, tensor, context and pipeline parallelism, and DeepSpeed's ZeRO."""
