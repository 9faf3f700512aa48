"""What Prometheus scrapes: vLLM's metrics under `jaxkv:`, so that its dashboards and load balancers find them."""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from jaxkv.outputs import Piece
from jaxkv.request import RequestOutput
from jaxkv.serve.engine_thread import EngineThread, Handle

if TYPE_CHECKING:
    from jaxkv.api import LLM

PREFIX = "jaxkv:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
           160.0, 640.0)  # fmt: skip
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts by bucket; prometheus_client's own takes locks that a count for each token would feel."""

    def __init__(self, text: str, bounds: Sequence[float]) -> None:
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def totals(self) -> tuple[float, int]:
        """Sum and count."""
        return self._sum, sum(self._counts)

    def family(self, name: str, labels: dict[str, str]) -> Metric:
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, self.text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


@dataclasses.dataclass
class _Progress:
    """Of one request that streams."""

    num_tokens: int = 0
    newest_s: float | None = None


class Metrics(Collector):
    """Hears of every request, and reads the engine's numbers when it is scraped.

    Args:
        llm: for what never changes.
        name: of the model.
    """

    def __init__(self, llm: "LLM", name: str) -> None:
        self._labels = {"model_name": name}
        self._cache = {
            "num_gpu_blocks": str(llm.num_pages), "block_size": str(llm.page_size), "cache_dtype": llm.kv_dtype,
        }  # fmt: skip
        self._engine: EngineThread | None = None
        self._progress: dict[str, _Progress] = {}
        self.endings: Counter[str] = Counter()  # completions, by finish reason
        self.refusals: Counter[str] = Counter()  # requests, by status
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.histograms = {
            "time_to_first_token_seconds": Histogram("From arrival to the first token.", SECONDS),
            "inter_token_latency_seconds": Histogram(
                "Between tokens: what streams saw; of others the request's mean, once for each token.", SHORT_S
            ),
            "request_time_per_output_token_seconds": Histogram("Mean of a request after its first token.", SHORT_S),
            "e2e_request_latency_seconds": Histogram("From arrival to the end.", SECONDS),
            "request_queue_time_seconds": Histogram("From arrival to the first step.", SECONDS),
            "request_prefill_time_seconds": Histogram("From the first step to the first token.", SECONDS),
            "request_decode_time_seconds": Histogram("From the first token to the end.", SECONDS),
            "request_inference_time_seconds": Histogram("From the first step to the end.", SECONDS),
            "request_prompt_tokens": Histogram("Tokens of prompts.", COUNTS),
            "request_generation_tokens": Histogram("Tokens of answers, over all completions of a request.", COUNTS),
            "request_params_n": Histogram("Completions asked for.", (1, 2, 5, 10, 20, 50, 100)),
            "request_params_max_tokens": Histogram("Most tokens asked for.", COUNTS),
        }
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(self)

    def attach(self, engine: EngineThread) -> None:
        """From now on `engine`'s numbers are read too."""
        self._engine = engine

    def note(self, handle: Handle, pieces: list[Piece], output: RequestOutput | None, now_s: float) -> None:
        """Takes what a step brought a request; `output` with its end."""
        key = handle.request.request_id
        if pieces:
            self._note_pieces(self._progress.setdefault(key, _Progress()), pieces, now_s)
        if output is not None:
            self._note_end(handle, output, self._progress.pop(key, _Progress()))

    def render(self, accept: str) -> tuple[bytes, str]:
        """What is scraped, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_metrics()
        yield self._counter("prompt_tokens", "Prompt tokens of requests that ended.", self.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.num_output_tokens)
        yield self._counter_by("request_success", "Completions that ended.", "finished_reason", self.endings)
        yield self._counter_by("request_refused", "Requests refused by the server.", "status", self.refusals)
        for name, histogram in self.histograms.items():
            yield histogram.family(PREFIX + name, self._labels)

    def _note_pieces(self, progress: _Progress, pieces: list[Piece], now_s: float) -> None:
        num = sum(piece.num_tokens for piece in pieces)
        if num and progress.newest_s is not None:
            self.histograms["inter_token_latency_seconds"].observe((now_s - progress.newest_s) / num, num)
        if num:
            progress.newest_s = now_s
        progress.num_tokens += num
        self.num_output_tokens += num

    def _note_end(self, handle: Handle, output: RequestOutput, progress: _Progress) -> None:
        num_prompt = len(output.prompt_token_ids)
        num_output = sum(len(completion.token_ids) for completion in output.outputs)
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += max(num_output - progress.num_tokens, 0)
        self.endings.update(str(completion.finish_reason) for completion in output.outputs)
        observed: dict[str, float | None] = {
            "request_prompt_tokens": num_prompt,
            "request_generation_tokens": num_output,
            "request_params_n": handle.request.params.n,
            "request_params_max_tokens": handle.request.params.max_tokens,
        }
        metrics = output.metrics
        if metrics is not None:
            observed |= {
                "e2e_request_latency_seconds": metrics.e2e_s,
                "request_queue_time_seconds": metrics.queue_s,
                "request_inference_time_seconds": metrics.e2e_s - metrics.queue_s,
                "time_to_first_token_seconds": metrics.ttft_s,
            }
        if metrics is not None and metrics.ttft_s is not None:
            decode_s = metrics.e2e_s - metrics.ttft_s
            observed["request_prefill_time_seconds"] = metrics.ttft_s - metrics.queue_s
            observed["request_decode_time_seconds"] = decode_s
            num_later = max(len(completion.token_ids) for completion in output.outputs) - 1
            if num_later > 0:
                observed["request_time_per_output_token_seconds"] = decode_s / num_later
            if num_later > 0 and not handle.stream:
                self.histograms["inter_token_latency_seconds"].observe(decode_s / num_later, num_later)
        for name, value in observed.items():
            if value is not None:
                self.histograms[name].observe(value)

    def _engine_metrics(self) -> Iterator[Metric]:
        if self._engine is None:
            return
        stats = self._engine.stats
        num_pages = stats.pages_free + stats.pages_cached + stats.pages_used
        yield self._gauge("num_requests_running", "Sequences with a row.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for one.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of pages in use, 0 to 1.", stats.pages_used / num_pages)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Of these, found.", stats.num_hit_tokens)
        yield self._counter("num_preemptions", "Sequences that lost their pages for a while.", stats.num_preemptions)
        yield self._counter("engine_steps", "Steps planned.", stats.num_steps)
        yield self._counter("engine_compiles", "Programs traced.", stats.num_compiles)
        for kind in ("free", "cached", "used", "retained"):
            yield self._gauge(f"pages_{kind}", f"Pages that are {kind}.", getattr(stats, f"pages_{kind}"))
        info = self._labels | self._cache
        family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "The page pool.", labels=list(info))
        family.add_metric(list(info.values()), 1)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Counter[str]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
        for value, count in sorted(values.items()):
            family.add_metric([*self._labels.values(), value], count)
        return family
