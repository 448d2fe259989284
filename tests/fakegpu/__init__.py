"""Fake GPUs: torch's unchanged CUDA build on a machine without a GPU. README.md says how."""
