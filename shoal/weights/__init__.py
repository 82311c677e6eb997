"""Where the weights of a model come from: drawn by name, or read from files."""
