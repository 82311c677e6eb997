"""What is done to a model before it is cut: precision, recomputation, compilation, the chunked loss."""
