"""Text to token ids and back: Hugging Face tokenizer.json, sentencepiece models and GGUF vocabularies."""

from jaxkv.tokenizer.base import Tokenizer as Tokenizer
from jaxkv.tokenizer.load import load_tokenizer as load_tokenizer
from jaxkv.tokenizer.save import save_tokenizer as save_tokenizer
