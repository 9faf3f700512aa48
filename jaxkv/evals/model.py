"""`JaxkvLM`: a model of lm-evaluation-harness, `--model jaxkv`.

All requests of a call are queued at once: the engine batches them, and those that begin alike (the answers of one
multiple-choice question, questions after the same examples) share pages. They are queued in the order of their tokens, so
that whoever shares comes one after the other and finds its pages also in a small pool.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxkv.api import LLM
from jaxkv.errors import ConfigError, RequestError
from jaxkv.evals.generation import read_gen_kwargs
from jaxkv.request import FinishReason, RequestOutput, SamplingParams

log = logging.getLogger(__name__)

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # what it was as text, context, continuation
Score = tuple[float, bool]  # log-likelihood, whether each token is the likeliest

_OURS = (None, "auto", 1, "1")  # batch sizes that say nothing: the harness's default is 1


@register_model("jaxkv")
class JaxkvLM(TemplateLM):
    """A loaded model for the harness.

    Args:
        pretrained: as `LLM.load` takes it; an `LLM` is used as it is.
        max_gen_toks: most new tokens where a task does not say it.
        add_bos_token: whether prompts begin with the BOS; None does what the tokenizer does by default.
        prefix_token_id: stands before a text without context; None is the BOS, or else the end of sequence.
        batch_size: the harness's; the engine batches by itself, as many as `max_rows`.
        max_batch_size: so is this.
        device: the harness's; the platform is jax's.
        load: further arguments of `LLM.load`.

    Raises:
        ConfigError: an argument is not supported, or the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: "str | os.PathLike[str] | LLM",
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **load: Any,
    ) -> None:
        super().__init__()
        if batch_size not in _OURS or max_batch_size is not None:
            size = max_batch_size if max_batch_size is not None else batch_size
            raise ConfigError(f"batch_size={size}: the engine batches by itself; put max_rows=N into --model_args")
        if device is not None:
            raise ConfigError(f"device={device!r}: set JAX_PLATFORMS instead; jaxkv takes jax's default")
        if isinstance(pretrained, LLM):
            if load:
                raise ConfigError(f"{sorted(load)} belong to a model that is to be loaded; this one is")
            self.llm = pretrained
        else:
            self.llm = LLM.load(pretrained, **load)
        if self.llm.tokenizer is None:
            raise ConfigError(f"{self.llm.name} has no tokenizer; the harness speaks in texts")
        self._tokens = self.llm.tokenizer
        self._max_gen_toks = max_gen_toks
        self._add_bos = add_bos_token
        self._prefix_id = prefix_token_id

    # --- what the harness asks about the model ---------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        text = self._tokens.special.texts.get("eos_token")
        found = self._tokens.vocabulary.token_id(text) if text else None
        return found if found is not None else min(self._tokens.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_id is not None:
            return self._prefix_id
        return self._tokens.bos_id if self._tokens.bos_id is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens that may precede the last one, as the harness counts them."""
        return self.llm.max_len - 1

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        add_bos = {None: self._add_bos, True: None, False: False}[add_special_tokens]  # None: as this tokenizer does
        return self._tokens.encode(string, add_bos=add_bos)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the harness's log."""
        template = self._tokens.chat_template
        if chat_template is False or template is None:
            return None
        name = "default" if chat_template is True else chat_template
        if name not in template.sources:
            raise RequestError(f"chat template {name!r} does not exist; this model has {sorted(template.sources)}")
        return template.sources[name]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as a prompt text; without a generation prompt the last message is left open, to be gone on with."""
        if self._tokens.chat_template is None:
            raise RequestError("this model has no chat template; leave --apply_chat_template out")
        text = self._tokens.chat_template.render(
            chat_history, add_generation_prompt=add_generation_prompt, special_tokens=self._tokens.special.texts
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    # --- requests --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **unused: Any) -> list[Score]:
        prompts, params = [], []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            if not continuation or len(continuation) >= len(tokens):
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens must have at least 1, and leave room for one before it "
                    f"in max_len={self.llm.max_len}"
                )
            prompts.append(tokens)
            start = len(tokens) - len(continuation)
            params.append(SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=start))
        scores = [_score(output) for output in self._run(prompts, params, disable_tqdm)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:  # None: a window of a longer text
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows: list[list[Pair]] = []
        for text in texts:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        scores = iter(self._loglikelihood_tokens([pair for each in windows for pair in each], disable_tqdm))
        sums = [sum(next(scores)[0] for _ in each) for each in windows]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        asked: list[Any] = [request.args for request in requests]
        for context, gen_kwargs in asked:
            params.append(read_gen_kwargs(gen_kwargs, self._max_gen_toks))
            room = self.llm.max_len - params[-1].max_tokens
            if room < 1:
                message = (
                    f"max_gen_toks={params[-1].max_tokens} leaves no room for a prompt in max_len={self.llm.max_len}"
                )
                raise RequestError(f"{message}; lower it, or raise max_len")
            prompts.append(self.tok_encode(context)[-room:])
        outputs = self._run(prompts, params, disable_tqdm)
        answers = [output.outputs[0].text for output in outputs]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], is_quiet: bool
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts, which run in the order of their tokens."""
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        outputs = self.llm.generate(
            [prompts[index] for index in order],
            [params[index] for index in order],
            progress=False if is_quiet else None,
        )
        for output in outputs:
            if output.outputs[0].finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {output.outputs[0].error}")
        by_index = dict(zip(order, outputs, strict=True))
        return [by_index[index] for index in range(len(prompts))]


def _score(output: RequestOutput) -> Score:
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    return sum(entry.logprob for entry in entries), all(entry.top[0][0] == entry.token_id for entry in entries)
