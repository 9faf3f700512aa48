"""Hugging Face folders: every type, one file and several, and damage of every kind."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.checkpoint.hf import HfSource
from jaxkv.errors import CheckpointError
from tests.checkpoint.tools import (
    BF16,
    assert_same_params,
    hf_config,
    load,
    params,
    random_tensors,
    write_hf,
    write_safetensors,
)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_conversion_rounds_as_numpy_does(stored: str, target: str, tmp_path: Path) -> None:
    tensors = random_tensors(hf_config(), np.dtype(stored))
    loaded = params(load(HfSource(write_hf(tmp_path, hf_config(), tensors)), dtype=target))
    np.testing.assert_array_equal(loaded["embed"], tensors["model.embed_tokens.weight"].astype(np.dtype(target)))
    down = tensors["model.layers.2.mlp.down_proj.weight"].astype(np.dtype(target))
    np.testing.assert_array_equal(loaded["layers/2/down"], down)


def test_query_key_value_are_grouped_by_key_head(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config())
    qkv = params(load(HfSource(write_hf(tmp_path, hf_config(), tensors))))["layers/1/qkv"]
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert qkv.shape == (2, 4, 8, 32)  # 2 KV heads, each with 2 query heads, a key and a value
    np.testing.assert_array_equal(qkv[1, 0], q[16:24])
    np.testing.assert_array_equal(qkv[1, 2], k[8:16])
    np.testing.assert_array_equal(qkv[0, 3], v[:8])


def test_files_with_an_index(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config())
    one = HfSource(write_hf(tmp_path / "one", hf_config(), tensors))
    folder = split(tmp_path / "two", tensors)
    assert_same_params(load(one), load(HfSource(folder)))
    assert HfSource(folder).digest == one.digest  # the weights count, not how they are split


def split(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config()))
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        write_safetensors(folder / file, {name: each for name, each in tensors.items() if names[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = split(tmp_path / "m", random_tensors(hf_config()))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing, but model.*index.json names it"):
        HfSource(folder)


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = split(tmp_path / "m", random_tensors(hf_config()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"ghost \(model-0.safetensors\)"):
        HfSource(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
def test_a_truncated_file_is_named_with_byte_counts(keep: int, tmp_path: Path) -> None:
    folder = write_hf(tmp_path, hf_config(), random_tensors(hf_config()))
    path = folder / "model.safetensors"
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: truncated.*{len(data)} bytes"):
        HfSource(folder)


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path, hf_config(), random_tensors(hf_config())))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated: tensor '.*' should end at byte \d+, the file ends at \d+"):
        load(source)


@pytest.mark.parametrize("header", [b"[1, 2]", b"{broken", b'{"x": {"dtype": "F32"}}', b'{"x": 7}'])
def test_a_damaged_header(header: bytes, tmp_path: Path) -> None:
    write_hf(tmp_path, hf_config(), {})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*header"):
        HfSource(tmp_path)


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config())
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
    tensors |= {f"extra.{i}": np.zeros(2, np.float32) for i in range(12)}
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((64, 32), np.int8)
    source = HfSource(write_hf(tmp_path, hf_config(), tensors))
    with pytest.raises(CheckpointError) as error:
        load(source)
    text = str(error.value)
    assert str(tmp_path) in text
    assert "missing: model.norm.weight, model.layers.1.mlp.up_proj.weight;" in text
    assert "wrong shape: model.layers.0.self_attn.k_proj.weight is (8, 32), not (16, 32);" in text
    assert "extra.9 and 2 more;" in text
    assert "stored in an unsupported type: model.layers.2.mlp.up_proj.weight (I8)" in text


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path, hf_config(tie_word_embeddings=False), random_tensors(hf_config())))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(source)


def test_tied_head_may_be_there_as_a_copy(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config(), BF16)
    expected = load(HfSource(write_hf(tmp_path / "a", hf_config(), tensors)))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    assert_same_params(load(HfSource(write_hf(tmp_path / "b", hf_config(), tensors))), expected)
    tensors["lm_head.weight"][5, 5] += 1
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_word"):
        load(HfSource(write_hf(tmp_path / "c", hf_config(), tensors)))


def test_what_else_the_folder_says(tmp_path: Path) -> None:
    source = HfSource(write_hf(tmp_path, hf_config(), random_tensors(hf_config(), BF16)))
    assert (source.generation_config, source.tokenizer_source, source.auto_dtype) == (None, None, BF16)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    source = HfSource(tmp_path)
    assert source.generation_config == {"eos_token_id": [2, 3]}
    assert source.tokenizer_source == tmp_path


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        HfSource(tmp_path)
    (tmp_path / "config.json").write_text("{]")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable JSON"):
        HfSource(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found \['pytorch_model.bin'\].*save_pretrained"):
        HfSource(tmp_path)


def test_the_digest_follows_weights_and_config(tmp_path: Path) -> None:
    tensors = random_tensors(hf_config())
    digests = {HfSource(write_hf(tmp_path / "a", hf_config(), tensors)).digest}
    digests.add(HfSource(write_hf(tmp_path / "b", hf_config(rope_theta=20000.0), tensors)).digest)
    tensors["model.norm.weight"][3] += 1
    digests.add(HfSource(write_hf(tmp_path / "c", hf_config(), tensors)).digest)
    assert len(digests) == 3
    assert HfSource(write_hf(tmp_path / "d", hf_config(), tensors)).digest in digests
