"""Attention kernels over paged K/V pools. Needs jax only, imports nothing of jaxkv."""
