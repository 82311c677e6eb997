"""What is done to a model whatever its layout: precision, recomputation, compilation, the chunked loss."""
