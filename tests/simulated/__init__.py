"""A test double of CUDA: simulated GPUs on a discrete-event timeline, whose truth is known.

What only it can do, and fake GPUs (tests/fakegpu) cannot: their clock runs in the host's time, with
the host's delays, and all their GPUs are alike. Here the host's time is simulated too, so that
reports must return true times within 1 %, and a GPU or a link can be slow, throttled or late, its
clock can drift, and the order on the PCI bus can differ from CUDA's.
"""
