"""What computes a model and exchanges its gradients: the plain model, DistributedDataParallel, or fully_shard."""
