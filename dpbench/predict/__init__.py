"""Prediction: what a step costs, and what it holds, on devices that are not here."""
