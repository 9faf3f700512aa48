"""The `jaxkv` command. Nothing here imports jax before the arguments are parsed, so that `--help` is instant."""

from jaxkv.cli.command import main as main
