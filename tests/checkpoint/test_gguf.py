"""GGUF files: every block format, the Q/K row order, rotary factors, and damage."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxkv.checkpoint.gguf import GgufSource
from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import model_config
from jaxkv.errors import CheckpointError
from jaxkv.models.rope import Rope
from tests.checkpoint.gguf_files import write_gguf
from tests.checkpoint.tools import BF16, assert_same_params, hf_config, load, params, random_tensors, write_hf


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ],
)
def test_the_same_model_as_from_hugging_face(changes: dict[str, Any], tmp_path: Path) -> None:
    config = hf_config(**changes)
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors))
    reference = HfSource(write_hf(tmp_path / "hf", config, tensors))
    assert model_config(source) == model_config(reference)
    for dtype in ("float32", "bfloat16"):
        assert_same_params(load(source, dtype=dtype), load(reference, dtype=dtype))
    assert source.auto_dtype == np.float32


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_models_equal_their_dequantised_weights(kind: Kind, tmp_path: Path) -> None:
    config = hf_config()
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind))

    def dequantised(name: str, tensor: np.ndarray) -> np.ndarray:
        if tensor.ndim == 1:
            return tensor
        return gguf.dequantize(gguf.quantize(tensor, kind), kind).reshape(tensor.shape)  # rows keep their blocks

    reference = {name: dequantised(name, tensor) for name, tensor in tensors.items()}
    for dtype in ("float32", "bfloat16"):
        loaded = load(source, dtype=dtype)
        assert_same_params(loaded, load(HfSource(write_hf(tmp_path / dtype, config, reference)), dtype=dtype))
    error = np.abs(params(load(source))["layers/1/down"] - tensors["model.layers.1.mlp.down_proj.weight"]).max()
    assert 0 < error < 0.1
    assert source.auto_dtype == BF16


BLOCK_KINDS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q4_1, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_decoded_in_chunks_equal_the_whole(kind: Kind, tmp_path: Path) -> None:
    """Raw blocks of random bits, more than fit in one chunk. gguf cannot make K-quants, but it can read them."""
    rows, columns = 1100, 256
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
    raw[~np.isfinite(expected).all(axis=1)] = raw[np.flatnonzero(np.isfinite(expected).all(axis=1))[0]]
    expected = gguf.dequantize(raw, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_feed_forward_length):
        add(1)
    writer.add_embedding_length(columns)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(tmp_path / "m.gguf")
    for dtype in (np.dtype(np.float32), BF16):
        found = source.read("model.embed_tokens.weight", dtype)
        np.testing.assert_array_equal(found, expected.astype(dtype))


FACTORS = np.float32([1, 1.5, 3, 8])


@pytest.mark.parametrize(
    ("keys", "factors", "rope"),
    [
        ({}, None, Rope(head_dim=8)),
        ({"llama.rope.scaling.type": "none"}, None, Rope(head_dim=8)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, None, "linear"),
        ({"llama.rope.scale_linear": 4.0}, None, "linear"),
        ({}, np.ones(4, np.float32), Rope(head_dim=8)),
        ({}, FACTORS, Rope(head_dim=8, kind="factors", factors=(1.0, 1.5, 3.0, 8.0))),
    ],
)
def test_rope(keys: dict[str, Any], factors: np.ndarray | None, rope: Rope | str, tmp_path: Path) -> None:
    extra = {} if factors is None else {"rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", hf_config(), random_tensors(hf_config()), keys=keys, extra=extra)
    _, cfg = model_config(GgufSource(path))
    assert cfg.kinds[0].rope == (Rope(head_dim=8, kind="linear", factor=4.0) if rope == "linear" else rope)


def test_factors_of_llama_3_follow_its_rule(tmp_path: Path) -> None:
    """The factors that convert_hf_to_gguf.py writes for Llama 3.1 give back the frequencies of the llama3 rule."""
    rule = Rope(head_dim=8, base=5e5, kind="llama3", factor=8.0, original_max_len=8192)
    plain = np.asarray(Rope(head_dim=8, base=5e5).inv_freq())
    factors = []
    for freq in plain.tolist():
        wavelen = 2 * np.pi / freq
        if wavelen < 8192 / 4:
            factors.append(1.0)
        elif wavelen > 8192 / 1:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelen - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    extra = {"rope_freqs.weight": np.float32(factors)}
    config = hf_config(rope_theta=5e5)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), extra=extra)
    _, cfg = model_config(GgufSource(path))
    np.testing.assert_allclose(cfg.kinds[0].rope.inv_freq(), rule.inv_freq(), rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 4.0},
            "rope.scaling.type='su' is not supported",
        ),
        ({"llama.rope.dimension_count": 4}, "partial_rotary_factor=0.5 is not supported"),
        ({"llama.expert_group_count": 8}, r"does not know.*llama.expert_group_count=8"),
        ({"llama.attention.key_length": 8, "llama.attention.value_length": 16}, "value_length=16 differs"),
        ({"llama.feed_forward_length": [64, 64, 32]}, "feed_forward_length=.* differs between layers"),
        ({"split.count": 3}, "one of 3 parts.*llama-gguf-split --merge"),
    ],
)
def test_refused_metadata(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{message}"):
        model_config(GgufSource(write_with(tmp_path, keys)))


def write_with(folder: Path, keys: dict[str, Any]) -> Path:
    config = hf_config()
    path = folder / "m.gguf"
    if "llama.feed_forward_length" in keys:  # the writer refuses a key given twice
        config = {**config, "intermediate_size": keys["llama.feed_forward_length"]}
        keys = {}
    tensors = random_tensors(hf_config())
    return write_gguf(path, config, tensors, keys=keys)


def test_the_same_number_for_every_layer_may_be_a_list(tmp_path: Path) -> None:
    config, tensors = hf_config(), random_tensors(hf_config())
    path = write_gguf(tmp_path / "m.gguf", {**config, "intermediate_size": [64] * 3}, tensors)
    assert model_config(GgufSource(path))[1].ffn == 64


def test_end_ids_and_tokenizer(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.model": "gpt2"}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", hf_config(), random_tensors(hf_config()), keys=keys))
    assert source.generation_config == {"eos_token_id": [3, 7]}
    assert source.tokenizer_source is not None and source.tokenizer_source["tokenizer.ggml.model"] == "gpt2"
    path = write_gguf(tmp_path / "n.gguf", hf_config(), random_tensors(hf_config()))
    assert GgufSource(path).tokenizer_source is None


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: general.architecture='rwkv7' is not known; jaxkv knows llama, qwen2, "
    ):
        GgufSource(tmp_path / "m.gguf")


def test_an_unsupported_block_format_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", hf_config(), random_tensors(hf_config()), extra={"other": np.zeros((2, 2), np.int8)}
    )
    with pytest.raises(CheckpointError, match=r"m\.gguf: the weights do not fit the config; unexpected: other"):
        load(GgufSource(path))
    config, tensors = hf_config(), random_tensors(hf_config())
    path = write_gguf(tmp_path / "n.gguf", config, tensors, kind=Kind.F32)
    data = path.read_bytes()
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # past the number of axes and two lengths stands the type
    path.write_bytes(data[:at] + int(Kind.I32).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"unsupported type: model.layers.1.mlp.down_proj.weight \(I32\)"):
        load(GgufSource(path))
    path.write_bytes(data[:at] + (97).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"tensor 'blk.1.ffn_down.weight' is of GGML type 97"):
        GgufSource(path)


@pytest.mark.parametrize("keep", [0, 3, 11, 200, -1, -3000])
def test_a_truncated_file_is_named_with_byte_counts(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_config(), random_tensors(hf_config()))
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    counts = rf"truncated: tensor .* should end at byte \d+, the file has {len(data)} bytes" if keep < 0 else "GGUF"
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{counts}"):
        GgufSource(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config())
    del tensors["model.layers.2.self_attn.q_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2.self_attn.q_proj.weight"):
        load(GgufSource(write_gguf(tmp_path / "m.gguf", hf_config(), tensors)))
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        GgufSource(write_gguf(tmp_path / "n.gguf", hf_config(), tensors))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"GGUF key llama\.embedding_length is missing"):
        GgufSource(tmp_path / "m.gguf")
