"""Predict: the duration and the memory of a training step on a machine that is described but not
available.
"""
