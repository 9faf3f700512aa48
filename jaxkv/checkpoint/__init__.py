"""Model files: Hugging Face safetensors, GGUF and Orbax, read straight into the target dtype and sharding."""
