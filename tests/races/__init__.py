"""A race detector for CUDA programs that run on the host: see `detect` in
tests/races/machine.py.
"""
