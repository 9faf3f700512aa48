"""Options made from tables: one row for each field of `SamplingParams` and each argument of `LLM.load`.

A flag that is not given is absent from the namespace, so that defaults are written down in one place only: where the
field or argument is defined.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxkv.cache_control import CacheControl, prompt_marks
from jaxkv.errors import RequestError
from jaxkv.request import SamplingParams
from jaxkv.structured import Choice, Grammar, JsonSchema, Regex

if TYPE_CHECKING:
    from jaxkv.api import LLM


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag. Its name is the field's, with dashes."""

    field: str
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] = str
    kind: Literal["value", "each", "on", "off"] = "value"  # each: repeatable; on: sets True; off: --no-FIELD sets False

    @property
    def flag(self) -> str:
        return ("--no-" if self.kind == "off" else "--") + self.field.replace("_", "-")


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from error


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.rpartition(":")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS such as 42:-1.5") from error


def _ttl(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text  # a name; `CacheControl` knows them


SAMPLING_OPTIONS = (
    Option("max_tokens", "most new tokens", "N", int),
    Option("min_tokens", "new tokens before the output may stop", "N", int),
    Option("temperature", "randomness; 0 always takes the likeliest token", "T", float),
    Option("top_k", "sample from the K likeliest tokens; 0 keeps all", "K", int),
    Option("top_p", "sample from the likeliest tokens that together have probability P", "P", float),
    Option("min_p", "drop tokens less likely than P times the likeliest", "P", float),
    Option("repetition_penalty", "divides scores of tokens seen in prompt or output; 1 is none", "X", float),
    Option("frequency_penalty", "subtracted per occurrence in the output, -2 to 2", "X", float),
    Option("presence_penalty", "subtracted once if in the output, -2 to 2", "X", float),
    Option("logit_bias", "add BIAS to the score of token ID; repeatable", "ID:BIAS", _bias, "each"),
    Option("allowed_token_ids", "make all other tokens impossible", "ID,ID,...", _ids),
    Option("bad_words", "text that must not be generated; repeatable", "TEXT", str, "each"),
    Option("stop", "text that ends the output; repeatable", "TEXT", str, "each"),
    Option("stop_token_ids", "token ids that end the output", "ID,ID,...", _ids),
    Option("ignore_eos", "go on after the model's own end tokens", kind="on"),
    Option("include_stop_str_in_output", "keep the stop text at the end of the output", kind="on"),
    Option("skip_special_tokens", "show special tokens in the output text", kind="off"),
    Option("seed", "makes sampling repeatable whatever else runs", "N", int),
    Option("n", "completions for each prompt", "N", int),
    Option("logprobs", "log-probabilities of each token and its K likeliest rivals (see --json)", "K", int),
    Option("prompt_logprobs", "the same for the prompt's tokens", "K", int),
    Option("prompt_logprobs_from", "index of the first prompt token that --prompt-logprobs is for", "N", int),
    Option("suppress_eos_until", "json: do not end before the output holds a complete JSON object or array", "WHAT"),
)

QUANT = Option("quant", "of the weights' matrices: int8, with a scale for each output channel", "SCHEME")
LOAD_OPTIONS = (
    Option("dtype", "of weights and activations: auto, float32 or bfloat16", "DTYPE"),
    QUANT,
    Option("kv_dtype", "of the KV cache: auto, float32, bfloat16 or float8_e4m3fn", "DTYPE"),
    Option("max_len", "tokens a sequence may hold, prompt and output", "N", int),
    Option("max_rows", "sequences running at once", "N", int),
    Option("page_size", "tokens in a page of the KV cache", "N", int),
    Option("num_pages", "pages in the pool", "N", int),
    Option("memory_fraction", "share of free memory for the pool; not with --num-pages", "F", float),
    Option("token_budget", "prompt tokens computed in a step", "N", int),
    Option("decode_steps", "tokens a sequence makes in one device loop", "N", int),
    Option("prefix_cache", "never reuse the pages of equal prompt beginnings", kind="off"),
    Option(
        "eviction",
        "which cached pages go first: lru (not used for longest), cost (cheap to compute again) or adaptive",
        "POLICY",
    ),
    Option("host_cache_bytes", "host memory for cached pages that the pool has no room for", "N", int),
    Option("cache_dir", "folder for those that host memory has no room for; a later start finds them", "FOLDER"),
    Option("disk_cache_bytes", "budget of this model's pages there (default: 10 GiB)", "N", int),
    Option(
        "demote", "which cached pages go down: retained (those somebody asked to keep, or of a session) or all", "WHICH"
    ),
    Option("grammar_bytes", "memory for the tables of structured outputs", "N", int),
    Option("overlap", "read each step before the next one is dispatched", kind="off"),
    Option("tensor", "devices over which weights and K/V heads are split", "N", int),
    Option("data", "groups of --tensor devices over which sequences are split", "N", int),
    Option("warm_up", "compile everything before the first request", kind="on"),
)
CACHE_OPTIONS = (
    Option("cache_salt", "prompts under different salts share nothing", "TEXT"),
    Option("prompt_cache_key", "prompts with one key run next to each other, on one data shard", "TEXT"),
    Option("prompt_cache_retention", "24h keeps the prompts that long; in_memory as long as there is room", "TIME"),
    Option("cache_ttl", "keeps the prompts for this long after their last use: 5m, 1h, 24h or seconds", "TIME", _ttl),
    Option("cache_breakpoints", "with --cache-ttl: only their first N tokens, up to four numbers", "N,N,...", _ids),
)
ENGINE_SEED = Option("seed", "base of the seeds of all requests", "N", int)


def add_sampling_options(
    parser: argparse.ArgumentParser, *, skip: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Adds a flag for each field of `SamplingParams`.

    Args:
        parser: of the subcommand.
        skip: fields that make no sense there.
        defaults: field -> value, where the command's default is not that of `SamplingParams`.
    """
    group = parser.add_argument_group("sampling")
    standard = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for option in SAMPLING_OPTIONS:
        if option.field not in skip:
            add_option(group, option, default=(standard | dict(defaults or {}))[option.field])
    if "structured" not in skip:
        _add_structured(parser)
    parser.set_defaults(**(defaults or {}))


def _add_structured(parser: argparse.ArgumentParser) -> None:
    """One flag for each form of structured output that can be written on a command line."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    given: dict[str, Any] = {"dest": "structured", "default": argparse.SUPPRESS}
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        type=_schema,
        help="the output is JSON that is valid under this schema",
        **given,
    )
    group.add_argument("--regex", metavar="PATTERN", type=_regex, help="the output matches PATTERN as a whole", **given)
    group.add_argument(
        "--choice", metavar="TEXT", action=_AddChoice, help="the output is one of these; repeatable", **given
    )
    group.add_argument(
        "--grammar",
        metavar="FILE",
        type=_grammar,
        help="the output is derived by this grammar: .gbnf, or else Lark",
        **given,
    )


class _AddChoice(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        texts = before.texts if isinstance(before, Choice) else ()
        setattr(namespace, self.dest, Choice((*texts, values)))


def _schema(path: str) -> Any:
    return _form(JsonSchema, _read(path))


def _regex(pattern: str) -> Any:
    return _form(Regex, pattern)


def _grammar(path: str) -> Any:
    return _form(Grammar, _read(path), "gbnf" if path.endswith(".gbnf") else "lark")


def _form(make: Callable[..., Any], *args: str) -> Any:
    try:
        return make(*args)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from error


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The flags as `SamplingParams`.

    Raises:
        RequestError: a value is out of range.
    """
    fields = _given(args, SAMPLING_OPTIONS)
    if hasattr(args, "structured"):
        fields["structured"] = args.structured
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    return SamplingParams(**fields)


def add_cache_options(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Adds flags for what a request says about the prefix cache; `skip` those that make no sense there."""
    group = parser.add_argument_group("prefix cache")
    for option in CACHE_OPTIONS:
        if option.field not in skip:
            add_option(group, option)


def cache_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as keyword arguments of `LLM.generate` and `LLM.stream`.

    Raises:
        RequestError: a value is out of range, or two contradict each other.
    """
    fields = _given(args, CACHE_OPTIONS)
    ttl, breakpoints = fields.pop("cache_ttl", None), fields.pop("cache_breakpoints", None)
    if ttl is not None:
        fields["cache_control"] = CacheControl(ttl=ttl, breakpoints=breakpoints)
    elif breakpoints is not None:
        raise RequestError("--cache-breakpoints needs --cache-ttl: for how long they are kept")
    prompt_marks(fields.get("cache_control"), fields.get("prompt_cache_retention"), sys.maxsize)
    return fields


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    skip: Collection[str] = (),
    engine_seed: bool = False,
    is_positional: bool = False,
) -> None:
    """Adds -m and a flag for each argument of `LLM.load`.

    Args:
        parser: of the subcommand.
        skip: arguments that make no sense there.
        engine_seed: whether --seed is the engine's; elsewhere it is a field of `SamplingParams`.
        is_positional: the model is the command's argument, instead of -m.
    """
    group = parser.add_argument_group("model")
    what = "smollm2, gemma3-270m, a Hugging Face folder, a .gguf file, a folder written by `jaxkv convert`, or a hub id"
    if is_positional:
        group.add_argument("model", metavar="MODEL", help=what)
    else:
        group.add_argument("-m", "--model", required=True, metavar="MODEL", help=what)
    for option in LOAD_OPTIONS:
        if option.field not in skip:
            add_option(group, option)
    if engine_seed:
        add_option(group, ENGINE_SEED)
    add_verbose_option(group)


def add_verbose_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="say how memory was divided, and what happens")


def load_arguments(args: argparse.Namespace, *, engine_seed: bool = False) -> dict[str, Any]:
    """The flags as keyword arguments of `LLM.load`; `engine_seed` as of `add_model_options`."""
    return _given(args, (*LOAD_OPTIONS, ENGINE_SEED) if engine_seed else LOAD_OPTIONS)


def load(args: argparse.Namespace, *, engine_seed: bool = False) -> "LLM":
    """Loads the model that the flags describe; `engine_seed` as of `add_model_options`.

    Raises:
        JaxkvError: as `LLM.load`.
    """
    from jaxkv.api import LLM  # brings jax: only now, after the arguments are known to be good

    return LLM.load(args.model, **load_arguments(args, engine_seed=engine_seed))


def add_option(parser: argparse._ActionsContainer, option: Option, *, default: Any = None) -> None:
    """Adds one flag; without it, the namespace has no such field."""
    if option.kind in ("on", "off"):
        parser.add_argument(
            option.flag, dest=option.field, action="store_const", const=option.kind == "on",
            default=argparse.SUPPRESS, help=option.help,
        )  # fmt: skip
        return
    shown = f" (default: {default})" if default not in (None, ()) else ""
    parser.add_argument(
        option.flag,
        dest=option.field,
        metavar=option.metavar,
        type=option.parse,
        action="append" if option.kind == "each" else "store",
        default=argparse.SUPPRESS,
        help=option.help + shown,
    )


def _given(args: argparse.Namespace, options: Collection[Option]) -> dict[str, Any]:
    return {option.field: getattr(args, option.field) for option in options if hasattr(args, option.field)}
