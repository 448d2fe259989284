"""Observe: training loops of the user, from a watched script or from a profiler trace, as trials."""
