"""Doctor: find out why this machine is slow for several GPUs, and what would help."""
