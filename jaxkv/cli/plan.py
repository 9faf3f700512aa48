"""`jaxkv plan`: what a model would do on accelerators that are not there."""

import argparse
import json
import sys
from typing import Any

from jaxkv.cli.options import QUANT, add_option, add_verbose_option

_DESCRIPTION = """\
Says whether a model fits accelerators that you do not have here, how many tokens of cache are left, and how fast it can
be at best. Compiles the real step programs with the accelerator's own compiler; needs no weights and no chip.

MODEL is a config.json, a folder that holds one, or a known name such as llama-3.1-8b."""

_EXAMPLES = """\
examples:
  jaxkv plan llama-3.1-8b --topology v6e:2x4
  jaxkv plan llama-3.3-70b --topology h200x8 --max-len 32768 --plot bound.png
  jaxkv plan ./my-model --topology tpu7x:2x2x1 --tensor 4 --data 2 --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan", help="does it fit, and how fast can it be: for chips that are not here", description=_DESCRIPTION,
        epilog=_EXAMPLES, allow_abbrev=False, usage="jaxkv plan MODEL --topology TOPOLOGY [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="config.json, a folder with one, or a known name")
    parser.add_argument(
        "--topology", required=True, metavar="TOPOLOGY", help="v6e:2x4, tpu7x:2x2x1, v5e:4x4, h200x8, ..."
    )
    parser.add_argument("--max-len", type=_count, metavar="N", help="tokens a sequence may hold (default: what fits)")
    parser.add_argument("--max-rows", type=_count, metavar="N", help="sequences running at once (default: 256)")
    parser.add_argument("--page-size", type=_count, default=16, metavar="N", help="tokens in a page (default: 16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--kv-dtype", choices=("bfloat16", "float32", "float8_e4m3fn"), help="of the KV cache (default: as --dtype)"
    )
    add_option(parser, QUANT)
    parser.add_argument("--tensor", type=_count, metavar="N", help="devices over which weights and K/V heads are split")
    parser.add_argument("--data", type=_count, metavar="N", help="devices over which sequences are split")
    parser.add_argument(
        "--context-len", type=_count, default=1024, metavar="N",
        help="tokens a sequence holds in the speed estimate (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=_counts, metavar="N,N,...", help="lengths at which to count the sequences that fit"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--plot", metavar="PNG", help="also draw the speed bound against batch size into this file")
    add_verbose_option(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be >= 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Prints the report; the exit status is 1 if the model does not fit.

    Raises:
        JaxkvError: model, topology or settings are impossible, or a package is missing.
    """
    from jaxkv.capacity.topology import parse_topology, prepare_environment

    prepare_environment()  # before anything brings jax
    from jaxkv.capacity import plot, text
    from jaxkv.capacity.known import read_config
    from jaxkv.capacity.plan import LENGTHS, Question, make_plan
    from jaxkv.capacity.report import to_json

    if args.plot:
        plot.check_matplotlib()
    report = make_plan(
        Question(
            model=args.model, config=read_config(args.model), topology=parse_topology(args.topology),
            dtype=args.dtype, quant=getattr(args, "quant", None), kv_dtype=args.kv_dtype, max_len=args.max_len,
            max_rows=args.max_rows, page_size=args.page_size, tensor=args.tensor, data=args.data,
            lengths=args.lengths or LENGTHS, context_len=args.context_len,
        )
    )  # fmt: skip
    print(json.dumps(_finite(to_json(report))) if args.json else text.render(report))
    if args.plot and report.bounds:
        plot.plot(report, args.plot)
    elif args.plot:
        print(f"nothing to draw: {args.plot} was not written", file=sys.stderr)
    return 0 if report.fits else 1


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for what was not computed."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value != value else value
