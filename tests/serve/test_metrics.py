"""What is scraped and traced, against what was asked."""

import json
import re
from importlib import resources
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.serve.metrics import Histogram
from tests.serve.stage import NAME, LiveServer, stream

ASK: dict[str, Any] = {"model": NAME, "max_tokens": 10, "ignore_eos": True}
# Those of vLLM's that routers, autoscalers and dashboards read.
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket", "cache_config_info",
    "request_time_per_output_token_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_params_n_bucket", "request_params_max_tokens_bucket",
)  # fmt: skip


def samples(server: LiveServer) -> dict[tuple[str, str], float]:
    """(name, bound of the bucket) -> value, over all other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            key = sample.name, sample.labels.get("le", "")
            found[key] = found.get(key, 0) + sample.value
    return found


def test_counts_are_those_of_the_requests(server: LiveServer) -> None:
    server.check_idle()
    before = samples(server)
    prompt = list(range(200, 240))
    server.post("/v1/completions", {**ASK, "prompt": prompt})
    server.post("/v1/completions", {**ASK, "prompt": prompt, "n": 2})
    stream(server, "/v1/completions", {**ASK, "prompt": prompt})
    assert server.post("/v1/completions", {**ASK, "prompt": []}).status_code == 400
    server.check_idle()
    after = samples(server)

    def gain(name: str, bound: str = "") -> float:
        key = f"jaxkv:{name}", bound
        return after[key] - before.get(key, 0)

    assert gain("prompt_tokens_total") == 3 * 40 and gain("generation_tokens_total") == 4 * 10
    assert gain("request_success_total") == 4 and gain("request_refused_total") == 1
    assert gain("e2e_request_latency_seconds_count") == gain("time_to_first_token_seconds_count") == 3
    assert gain("inter_token_latency_seconds_count") >= 9 + 9 + 1
    assert gain("request_prompt_tokens_bucket", "50.0") == 3 and gain("request_prompt_tokens_bucket", "20.0") == 0
    assert gain("prefix_cache_hits_total") >= 2 * 32
    assert after["jaxkv:num_requests_running", ""] == after["jaxkv:pages_used", ""] == 0
    whole = gain("request_queue_time_seconds_sum") + gain("request_inference_time_seconds_sum")
    assert whole == pytest.approx(gain("e2e_request_latency_seconds_sum"))
    assert all(f"jaxkv:{name}" in {key for key, _ in after} for name in VLLM)


def test_open_metrics_is_spoken_too(server: LiveServer) -> None:
    response = server.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_every_metric_of_the_dashboard_is_there(server: LiveServer) -> None:
    assert server.post("/v1/completions", {**ASK, "prompt": [1, 2]}).status_code == 200
    assert server.post("/v1/completions", {**ASK, "prompt": []}).status_code == 400
    dashboard = json.loads(resources.files("jaxkv.serve").joinpath("grafana.json").read_text(encoding="utf-8"))
    text = json.dumps([panel["targets"] for panel in dashboard["panels"]])
    wanted = set(re.findall(r"jaxkv:\w+", text))
    assert len(wanted) > 15 and wanted <= {name for name, _ in samples(server)}


def test_a_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram("x", (1, 2.5))
    for value, count in ((1.0, 1), (1.1, 2), (9.0, 1)):
        histogram.observe(value, count)
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.family("h", {}).samples}
    assert found == {
        ("h_bucket", "1.0"): 1, ("h_bucket", "2.5"): 3, ("h_bucket", "+Inf"): 4, ("h_count", None): 4,
        ("h_sum", None): pytest.approx(12.2),
    }  # fmt: skip


def test_each_request_is_a_span_in_the_callers_trace(server: LiveServer) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    opentelemetry.trace.set_tracer_provider(provider)
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    server.post("/v1/completions", {**ASK, "prompt": "The dog", "temperature": 0.5}, headers=headers)
    server.check_idle()
    spans: Any = exporter.get_finished_spans()
    (span,) = spans
    assert f"{span.context.trace_id:032x}" == trace and span.name == "llm_request"
    told = span.attributes
    assert told["gen_ai.usage.completion_tokens"] == 10 and told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(told["gen_ai.latency.e2e"], abs=0.01)
    assert not any("dog" in str(value) for value in told.values())
