"""Predict: the time and memory of a training step on a described but unavailable machine."""
