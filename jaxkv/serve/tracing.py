"""OpenTelemetry spans, one a request, where the package is there (`pip install 'jaxkv[serve,otel]'`).

The exporter is set up as OpenTelemetry's own environment variables say; without OTEL_EXPORTER_OTLP_ENDPOINT nothing leaves
the process. Attributes have the names of the semantic conventions for generative models, as vLLM's have.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from jaxkv.request import RequestOutput
from jaxkv.serve.engine_thread import Handle

try:
    import opentelemetry.propagate as propagate
    import opentelemetry.trace as trace
except ImportError:
    trace = propagate = None


class Tracer:
    """Records requests that ended; does nothing without the package."""

    def context(self, headers: Mapping[str, str]) -> Any:
        """The trace that a client says its request belongs to."""
        return None if propagate is None else propagate.extract(headers)

    def record(self, handle: Handle, output: RequestOutput, model: str) -> None:
        """Writes the span of a request."""
        if trace is None or output.metrics is None:
            return
        metrics, params = output.metrics, handle.request.params
        end_ns = time.time_ns()
        start_ns = end_ns - int(metrics.e2e_s * 1e9)
        span = trace.get_tracer("jaxkv").start_span(
            "llm_request", context=handle.context, kind=trace.SpanKind.SERVER, start_time=start_ns
        )
        attributes = {
            "gen_ai.response.model": model,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
            "gen_ai.usage.cached_tokens": output.cached_tokens,
            "gen_ai.response.finish_reasons": [str(completion.finish_reason) for completion in output.outputs],
            "gen_ai.latency.time_in_queue": metrics.queue_s,
            "gen_ai.latency.e2e": metrics.e2e_s,
        }
        if metrics.ttft_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = metrics.ttft_s
        span.set_attributes(attributes)
        span.end(end_time=end_ns)


def export_traces() -> None:
    """Sends spans where OTEL_EXPORTER_OTLP_ENDPOINT says, if the exporter is installed."""
    if "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ and "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in os.environ:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    assert trace is not None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
