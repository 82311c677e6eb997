"""What a run tells the world: metrics to loggers, progress to the terminal, profiles, FLOPs and memory."""
