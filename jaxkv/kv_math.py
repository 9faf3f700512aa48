"""The arithmetic of KV caches: how many bytes tokens take, and how many tokens fit.

Each token keeps a key and a value in every layer, so a cache holds `2 · batch · layers · width · tokens` numbers, where
`width` is the hidden size under multi-head attention and `num_kv_heads · head_dim` under grouped-query attention.
"""

from jaxkv.errors import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be >= 1")


def _kv_width(hidden_size: int | None, num_kv_heads: int | None, head_dim: int | None) -> int:
    """Returns the numbers a key (or a value) of one token has in one layer."""
    if hidden_size is not None:
        if num_kv_heads is not None or head_dim is not None:
            raise ConfigError(
                f"hidden_size={hidden_size} together with num_kv_heads={num_kv_heads}, head_dim={head_dim} says the width"
                " twice; give hidden_size for multi-head attention, or num_kv_heads and head_dim"
            )
        _check_positive(hidden_size=hidden_size)
        return hidden_size
    if num_kv_heads is None or head_dim is None:
        raise ConfigError(
            f"num_kv_heads={num_kv_heads}, head_dim={head_dim} must both be given when hidden_size is not"
        )
    _check_positive(num_kv_heads=num_kv_heads, head_dim=head_dim)
    return num_kv_heads * head_dim


def kv_cache_bytes(
    *,
    num_layers: int,
    hidden_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    num_tokens: int = 1,
    batch: int = 1,
    dtype_bytes: int = 2,
) -> int:
    """Returns the bytes that keys and values take.

    The width comes from `hidden_size` (multi-head attention) or from `num_kv_heads` and `head_dim`, never both.

    >>> kv_cache_bytes(num_layers=1, hidden_size=12288)  # 48 KiB a token a layer
    49152
    >>> format_bytes(kv_cache_bytes(num_layers=96, hidden_size=12288, num_tokens=128 * 1024))
    '576 GiB'

    Args:
        num_layers: layers with attention.
        hidden_size: numbers in a hidden state, where all heads have their own K and V.
        num_kv_heads: KV heads of a layer.
        head_dim: numbers in a head.
        num_tokens: tokens of one sequence, prompt and output.
        batch: sequences of that length.
        dtype_bytes: bytes a number (2 for bf16, 4 for f32, 1 for fp8 and int8).

    Raises:
        ConfigError: a value is below 1, or the width is missing or given twice.
    """
    _check_positive(num_layers=num_layers, num_tokens=num_tokens, batch=batch, dtype_bytes=dtype_bytes)
    width = _kv_width(hidden_size, num_kv_heads, head_dim)
    return 2 * batch * num_layers * width * num_tokens * dtype_bytes


def peak_kv_cache_bytes(*, batch: int, num_layers: int, hidden_size: int, prompt_len: int, output_len: int) -> int:
    """Returns the peak bytes of a bf16 cache under multi-head attention: `4·b·l·h·(s+n)`.

    From "FlexGen: High-Throughput Generative Inference of Large Language Models with a Single GPU" (Sheng et al., 2023).

    Args:
        batch: sequences, b.
        num_layers: l.
        hidden_size: h.
        prompt_len: tokens, s.
        output_len: tokens, n.

    Raises:
        ConfigError: a value is below 1.
    """
    _check_positive(prompt_len=prompt_len, output_len=output_len)
    return kv_cache_bytes(
        num_layers=num_layers, hidden_size=hidden_size, num_tokens=prompt_len + output_len, batch=batch, dtype_bytes=2
    )


def kv_cache_tokens(
    memory_bytes: int,
    *,
    num_layers: int,
    hidden_size: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype_bytes: int = 2,
) -> int:
    """Returns how many tokens fit into `memory_bytes`, rounded down; arguments as of `kv_cache_bytes`.

    Raises:
        ConfigError: a value is out of range, or the width is missing or given twice.
    """
    if memory_bytes < 0:
        raise ConfigError(f"memory_bytes={memory_bytes} must be >= 0")
    token_bytes = kv_cache_bytes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
    )
    return memory_bytes // token_bytes


def gqa_saving(*, num_heads: int, num_kv_heads: int) -> float:
    """Returns how many times smaller grouped-query attention makes the cache than one KV head a query head.

    >>> gqa_saving(num_heads=32, num_kv_heads=8)
    4.0

    Raises:
        ConfigError: a value is below 1, or query heads cannot be shared out evenly.
    """
    _check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    return num_heads / num_kv_heads


def format_bytes(num_bytes: int) -> str:
    """Returns bytes in the largest binary unit that leaves at least 1, with up to two decimals: `4.5 MiB`.

    Raises:
        ConfigError: the number is negative.
    """
    if num_bytes < 0:
        raise ConfigError(f"num_bytes={num_bytes} must be >= 0")
    value = float(num_bytes)
    for unit in _UNITS:
        # 1023.995 would be printed as 1024, which belongs to the next unit
        if round(value, 2) < 1024 or unit == _UNITS[-1]:
            return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit returns")
