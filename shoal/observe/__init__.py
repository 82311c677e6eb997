"""What a run reports: metrics for loggers, progress on the terminal, profiles, FLOPs and memory."""
