"""Attention of query tiles over a paged K/V pool, which also writes their new K/V into it.

The signature every back end shares is that of `reference.paged_attention`.
"""

from kernels_pallas.paged_attention.reference import paged_attention as paged_attention
from kernels_pallas.paged_attention.reference import storage_dtype as storage_dtype
from kernels_pallas.paged_attention.tiles import Tiles as Tiles
