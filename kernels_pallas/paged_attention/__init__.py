"""Attention of query tiles over a paged K/V pool, and writing new K/V into it.

The signature every back end shares is that of `reference.paged_attention` and `reference.write_kv`.
"""

from kernels_pallas.paged_attention.reference import paged_attention as paged_attention
from kernels_pallas.paged_attention.reference import write_kv as write_kv
