"""Predict: what a step costs, and holds, on a machine that is not here."""
