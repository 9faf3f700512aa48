"""`save_tokenizer`: writes a folder from which `load_tokenizer` makes the same tokenizer."""

import json
import os
from pathlib import Path
from typing import Any

from jaxkv.tokenizer.base import Tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json or tokenizer.model, and tokenizer_config.json, into an existing folder.

    So a converted checkpoint keeps its tokenizer, chat template and end ids, whatever file they came from.
    """
    folder = Path(folder)
    special = tokenizer.special
    config: dict[str, Any] = {**special.texts, **tokenizer.vocabulary.save(folder), "eos_ids": sorted(special.eos_ids)}
    eos_id = tokenizer.vocabulary.token_id(special.texts.get("eos_token", ""))
    if special.prefix_ids in ((), (special.bos_id,)) and special.suffix_ids in ((), (eos_id,)):
        config["add_bos_token"] = bool(special.prefix_ids)
        config["add_eos_token"] = bool(special.suffix_ids)
    if tokenizer.chat_template is not None:
        sources = tokenizer.chat_template.sources
        named = [{"name": name, "template": source} for name, source in sorted(sources.items())]
        config["chat_template"] = sources["default"] if sources.keys() == {"default"} else named
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
