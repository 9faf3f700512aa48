"""Reads a Hugging Face config.json field by field and refuses what nobody read.

A field that changes the arithmetic and is overlooked gives text that looks almost right, so a field is either read by
the family, known to be harmless (below), switched off, or an error.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.errors import CheckpointError
from jaxkv.models.config import ModelConfig

# Fields that say nothing about a decoder's forward pass, or only how transformers computes it.
_HARMLESS_FIELDS = """
architectures model_type name_or_path torch_dtype dtype use_cache is_decoder is_llama_config auto_map
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
initializer_range attention_dropout hidden_dropout embd_dropout resid_dropout resid_pdrop embd_pdrop attn_pdrop
pretraining_tp cache_implementation
output_hidden_states output_attentions output_scores output_router_logits router_aux_loss_coef router_jitter_noise
return_dict return_dict_in_generate
torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
finetuning_task problem_type id2label label2id task_specific_params
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
begin_suppress_tokens exponential_decay_length_penalty
"""
_HARMLESS = frozenset(_HARMLESS_FIELDS.split())
_HARMLESS_PREFIXES = ("_", "unsloth", "transformers")
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_REQUIRED = object()


class HfConfig:
    """One pass over a config; every method raises CheckpointError for a field that is missing or of the wrong kind.

    Args:
        values: the parsed config.json, or an object in it.
        prefix: of the field names in errors, e.g. "rope_parameters.".
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The field's value as it stands; `default` if it is absent or null."""
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"config field {self._prefix}{name} is missing")
        return default

    def size(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number >= 1."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config field {self._prefix}{name}={value!r} must be a whole number >= 1")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number > 0."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise CheckpointError(f"config field {self._prefix}{name}={value!r} must be a number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config field {self._prefix}{name}={value!r} must be true or false")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; an empty one if the field is absent or null."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config field {self._prefix}{name}={value!r} must be an object")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """The field is absent, null, or one of `supported`."""
        value = self.get(name, None)
        if value is not None and value not in supported:
            raise self.unsupported(name, value, *supported)

    def unsupported(self, name: str, value: Any, *supported: Any) -> CheckpointError:
        """The error for a value this family does not compute."""
        known = ", ".join(repr(each) for each in supported)
        return CheckpointError(f"config field {self._prefix}{name}={value!r} is not supported; supported: {known}")

    def finish(self) -> None:
        """Refuses fields that nobody read, unless they are harmless or switched off.

        Raises:
            CheckpointError: naming them all.
        """
        left = {
            name: value
            for name, value in self._values.items()
            if name not in self._read
            and name not in _HARMLESS
            and not name.startswith(_HARMLESS_PREFIXES)
            and value not in _OFF
        }
        if left:
            fields = ", ".join(f"{self._prefix}{name}={value!r}" for name, value in sorted(left.items()))
            raise CheckpointError(
                f"config fields that jaxkv does not know and that may change the model's arithmetic: {fields}; delete "
                "them from config.json if you know that they do not"
            )


def from_hf(
    model_type: str,
) -> Callable[[Callable[[HfConfig], ModelConfig]], Callable[[Mapping[str, Any]], ModelConfig]]:
    """Makes a family's `config_from_hf` of a function that reads its fields.

    What comes out raises CheckpointError for a config of another `model_type`, for a field that is missing or impossible,
    and for one that nobody read and that may ask for arithmetic that jaxkv does not have.
    """

    def wrap(read: Callable[[HfConfig], ModelConfig]) -> Callable[[Mapping[str, Any]], ModelConfig]:
        @functools.wraps(read)
        def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
            config = HfConfig(values)
            config.only("model_type", model_type)
            cfg = read(config)
            config.finish()
            return cfg

        return config_from_hf

    return wrap
