"""What a number depends on: versions, machine, model and workload."""

import os
import pathlib
import platform
import resource
import sys
from typing import Any

import jax

import jaxkv
from jaxkv.api import LLM
from jaxkv.bench.workloads import Workload


def conditions(llm: LLM, workload: Workload) -> dict[str, Any]:
    """The first entries of every result."""
    device = jax.devices()[0]
    return {
        "benchmark": workload.name,
        "model": llm.name,
        "dtype": llm.dtype,
        "quant": llm.quant,
        "kv_dtype": llm.kv_dtype,
        "mesh": llm.mesh,
        "num_requests": workload.num_requests,
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "versions": {"jaxkv": jaxkv.__version__, "jax": jax.__version__},
        "python": platform.python_version(),
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """The processor's name with its vector extensions that matter: bf16 speeds differ tenfold with them."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set(fields.get("flags", "").split())
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *known])


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss would count the parent's memory: it survives fork and exec
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
