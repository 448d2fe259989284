"""A race detector for CUDA programs that run on the host: `detect` in tests/races/machine.py."""
