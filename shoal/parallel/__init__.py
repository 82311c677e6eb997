"""How a model is cut: sharding, tensor, context and pipeline parallelism, and DeepSpeed's ZeRO."""
