"""Continuous batching on the host: who waits, who runs, and what the next step computes."""
