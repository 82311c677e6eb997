"""The mechanisms behind the strategies: weights, precision, compilation."""
