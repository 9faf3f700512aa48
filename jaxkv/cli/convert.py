"""`jaxkv convert`: any model jaxkv can read, to an Orbax checkpoint."""

import argparse

from jaxkv.cli.options import add_verbose_option

_DESCRIPTION = """\
Converts a model to an Orbax checkpoint, which loads faster and onto any number of devices.

The folder holds weights, configuration, tokenizer and chat template; give it to -m. It appears only when complete."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "convert", help="write a model as an Orbax checkpoint", description=_DESCRIPTION,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", metavar="IN", help="smollm2, a Hugging Face folder, a .gguf file, or a hub id")
    parser.add_argument("target", metavar="OUT", help="folder to create")
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32 or bfloat16 (default: auto)")
    add_verbose_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        JaxkvError: the model cannot be read or written.
    """
    from jaxkv.convert import convert

    convert(args.source, args.target, dtype=args.dtype)
    return 0
