"""A simulated machine with several GPUs: a test double of CUDA on a discrete-event timeline, whose
truth is known.
"""
