"""Predict: the time and the memory of a training step on a machine that is not at hand."""
