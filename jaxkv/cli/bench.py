"""`jaxkv bench`: measures this machine. The benchmarks are in `jaxkv.bench`; here are only their flags."""

import argparse
import dataclasses

from jaxkv.cli import options

_DESCRIPTION = """\
Measures speed and memory with random prompts, and compares with other engines in the same run.

Every result names its conditions: versions, machine, model and lengths. Progress goes to stderr, results to stdout."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A number that shapes the workload."""

    name: str
    default: int
    help: str


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark; its flags' defaults are the workload that the README's numbers are for."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    compare: tuple[str, ...] = ()  # engines it can be compared with
    fixes: tuple[str, ...] = ()  # arguments of `LLM.load` that the benchmark sets itself


_REPEATS = Flag("repeats", 3, "timed runs; the median is reported")

BENCHMARKS = (
    Benchmark(
        "throughput",
        "many equal requests at once: output tokens a second",
        (
            Flag("num_requests", 16, "requests, all at once"),
            Flag("prompt_len", 256, "tokens in each prompt"),
            Flag("output_len", 128, "tokens generated for each"),
            _REPEATS,
        ),
        ("hf", "contiguous"),
    ),
    Benchmark(
        "latency",
        "one request alone: time to first token, tokens a second after it",
        (
            Flag("prompt_len", 128, "tokens in the prompt"),
            Flag("output_len", 128, "tokens generated"),
            _REPEATS,
        ),
        ("hf", "contiguous"),
    ),
    Benchmark(
        "mix",
        "requests of log-normal lengths at once, as in conversations",
        (Flag("num_requests", 48, "requests, all at once"), _REPEATS),
        ("hf",),
    ),
    Benchmark(
        "prefix",
        "requests that share a beginning: prefix cache off, from cold, warm",
        (
            Flag("num_requests", 16, "requests, all at once"),
            Flag("shared_len", 1024, "prompt tokens that all have in common"),
            Flag("own_len", 32, "further prompt tokens of each"),
            Flag("output_len", 32, "tokens generated for each"),
            _REPEATS,
        ),
        ("hf",),
        fixes=("prefix_cache",),
    ),
    Benchmark(
        "kv-cache",
        "one prompt with no cache, a contiguous cache and the paged one: time a token and memory against length",
        (
            Flag("prompt_len", 64, "tokens in the prompt"),
            Flag("output_len", 192, "tokens generated"),
        ),
        fixes=("decode_steps", "overlap"),
    ),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench", help="measure speed and memory", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True)
    for benchmark in BENCHMARKS:
        _add_benchmark(benchmarks, benchmark)


def _add_benchmark(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", benchmark: Benchmark) -> None:
    parser = subparsers.add_parser(
        benchmark.name, help=benchmark.help, description=benchmark.help, allow_abbrev=False,
        usage=f"jaxkv bench {benchmark.name} -m MODEL [options]",
    )  # fmt: skip
    for flag in benchmark.flags:
        parser.add_argument(
            "--" + flag.name.replace("_", "-"), action=_Remember, type=_at_least_one, default=flag.default, metavar="N",
            help=f"{flag.help} (default: {flag.default})",
        )  # fmt: skip
    if benchmark.compare:
        parser.add_argument(
            "--compare", action="append", choices=benchmark.compare, default=[],
            help="run this engine too, on the same weights and prompts; repeatable",
        )  # fmt: skip
    if benchmark.name == "prefix":
        parser.add_argument(
            "--trace", action="append", choices=("shared", "chat", "agents", "few-shot", "all"), default=[],
            help="replay this trace under every eviction policy instead, also in pools too small for it; repeatable",
        )  # fmt: skip
        parser.add_argument(
            "--think", type=_at_least_zero, metavar="N",
            help="with --trace: a client sends on N answers to others after its own (default: 0, at once)",
        )  # fmt: skip
        parser.add_argument(
            "--long-len", action=_Remember, type=_at_least_one, metavar="N",
            help="also time the first token after N shared tokens, new and cached; needs --max-len N or more",
        )  # fmt: skip
    if benchmark.name == "kv-cache":
        parser.add_argument("--out", metavar="PNG", help="also draw the curves into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    options.add_model_options(parser, skip=("warm_up", *benchmark.fixes), engine_seed=True)  # it warms up anyway
    parser.set_defaults(run=run, given=())


class _Remember(argparse.Action):
    """Stores the value, and in `given` that the flag was there: what has no say must be refused, not ignored."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = (*namespace.given, self.option_strings[0])


def _at_least_one(text: str) -> int:
    return _at_least(text, 1)


def _at_least_zero(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} must be >= {least}")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs a benchmark.

    Raises:
        JaxkvError: the model is refused, or an engine to compare with is not installed.
    """
    from jaxkv.bench import run as bench

    return bench.run(args, {"model": args.model, **options.load_arguments(args, engine_seed=True)})
