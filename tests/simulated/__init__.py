"""A test double of CUDA: simulated GPUs on a discrete-event timeline, whose truth is known."""
