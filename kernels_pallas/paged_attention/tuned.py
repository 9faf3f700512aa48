"""Tile sizes of the kernels, each with where it comes from."""

# --- TPU -------------------------------------------------------------------------------------------------------------
# From the schedules that the TPU compiler wrote for v5e (libtpu 0.0.52; bf16, K = 8, G = 4, D = 128); nothing was timed on
# a chip. "Cycles" are instruction bundles, a lower bound, at 1.5 GHz: in 3800 of them v5e reads 512 keys, 2 MiB, from HBM.

# Keys of a key tile. Decode: 940 cycles of arithmetic per 512 keys, 1830 per 1024, both hidden behind HBM, as is starting
# and awaiting copies, 23 a page. 32 queries: 1.2 cycles a key and head at 512, 1.8 at 256. 128 queries: 3.2 and 5.6.
TPU_KEY_TILE = 512

# Bytes that both halves of the K/V buffer may take, a page each at least: shorter key tiles for models of many KV heads.
TPU_KV_BYTES = 8 << 20

# Rows of scores (GQ of each KV head, 8 at least as registers have 8) to issue together. Decode, 512 keys: 120 cycles a
# head with 8 heads together, 190 one by one, as nothing then hides the latency of the matrix unit.
TPU_ROWS_TOGETHER = 64

# What a kernel may take of VMEM: v5e and v6e have 128 MiB, a core of tpu7x 64. XLA keeps small arrays there too.
TPU_VMEM_BYTES = 48 << 20

# What a kernel may take of SMEM: v5e and v6e have 1 MiB, of which the compiler keeps 3 KiB and more.
TPU_SMEM_BYTES = 960 << 10

# --- GPU: Hopper -----------------------------------------------------------------------------------------------------
# From sizes and data sheets; nothing here was timed on a GPU yet. Of what a program fixes once (heads, head dim) and
# never of the number of rows: a row's result must not depend on its batch.

# SMs of an H100 or H200.
GPU_SMS = 132

# Keys of a decode row's split, at least: at D = 128 128 KiB, 3.6 us at an SM's share of 4.8 TB/s, some times a block's start.
GPU_MIN_SPLIT = 256

# K and V in flight on an SM. 4.8 TB/s over 132 SMs x 0.8 us of latency are 29 KiB; the rest bridges a block's end and start.
GPU_RING_BYTES = 128 << 10

# New K/V that a block stores at a time: 16 tokens of D = 128, each some 20 ns to start, beside 1 us until the first one is here.
# Twice as much would not fit beside D = 256.
GPU_WRITE_BYTES = 8 << 10

# What a block may take of shared memory: 227 KiB less barriers and the like.
GPU_SHARED_BYTES = 223 << 10


def gpu_splits(num_kv_heads: int) -> int:
    """Splits of a long row's keys in decode: enough that one row fills the device, but all are read when combined."""
    return min(max(-(-GPU_SMS // num_kv_heads), 1), 64)


def gpu_stages(chunk_bytes: int, other_bytes: int) -> int:
    """Chunks of keys and values in the ring, `chunk_bytes` each, beside what else a block keeps in shared memory."""
    return min(max(min(GPU_RING_BYTES, GPU_SHARED_BYTES - other_bytes) // chunk_bytes, 2), 4)
