"""Predictions for machines that are not here: docs/predicting.md says how each is made."""
