"""What the HTTP server costs, and whether it survives a crowd: two programs against one real server process.

    python scripts/bench_serve.py overhead -m smollm2 --requests 32 --rounds 3
    python scripts/bench_serve.py crowd -m smollm2 --clients 64 --seconds 120

`overhead` does the same work (same prompts, same seeds) through the engine alone, in the server's own process and thread,
and through HTTP with streaming clients, in turns; it prints both rates, processor seconds and steps, and their ratios. `crowd`
lets clients stream, a third of which hang up at random, checks each stream against what the engine alone says, and looks at
pages and memory. Both compile everything first: clients that come one by one meet sizes that the engine alone does not, and
a program takes longer to compile than a round. Prints one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

STARTED = re.compile(r"at http://([\d.]+):(\d+)")


class ServerProcess:
    """`jaxkv serve` on a free port."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "jaxkv", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = None
        while found is None:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start: exit status {self.process.wait()}")
            found = STARTED.search(line)
        self.host, self.port = found[1], int(found[2])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, name
        return float(found[1])

    def rss_mb(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)


async def stream(server: ServerProcess, body: dict[str, Any], stop_after: int | None = None) -> list[int]:
    """The token ids of a streamed completion, over a bare socket: a client that costs next to nothing.

    Args:
        server: to ask.
        body: of the request.
        stop_after: tokens after which the client hangs up.
    """
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**20)
    ids: list[int] = []
    try:
        data = json.dumps({**body, "stream": True, "logprobs": 0, "return_tokens_as_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(2000)
        while True:
            line = await reader.readline()
            assert line, "the stream ended early"
            if line == b"data: [DONE]\n":
                return ids
            if line.startswith(b"data: "):
                ids += [int(each) for each in re.findall(rb'"token_id:(\d+)"(?=[,\]])', _tokens_of(line))]
                if stop_after is not None and len(ids) >= stop_after:
                    return ids
    finally:
        writer.close()


def _tokens_of(line: bytes) -> bytes:
    """The list of tokens in a chunk, found without parsing the rest."""
    start = line.find(b'"tokens":[')
    return b"" if start < 0 else line[start : line.index(b"]", start) + 1]


def make_bodies(num: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of several lengths, each with a seed, which make exactly `max_tokens` tokens."""
    rng = random.Random(0)
    return [
        {
            "prompt": [rng.randrange(100, 5000) for _ in range(rng.randrange(16, 96))],
            "max_tokens": max_tokens, "temperature": 1.0, "seed": number, "ignore_eos": True,
        }
        for number in range(num)
    ]  # fmt: skip


async def overhead(args: argparse.Namespace, load: list[str]) -> dict[str, Any]:
    """Rates of the same work through the engine alone and through HTTP, in one process, in turns."""
    import uvicorn

    from jaxkv import LLM, SamplingParams
    from jaxkv.cli.command import build_parser
    from jaxkv.cli.options import load_arguments
    from jaxkv.serve.app import make_app
    from jaxkv.serve.limits import ServeConfig
    from jaxkv.serve.service import Service

    options = build_parser().parse_args(["serve", args.model, "--warm-up", *load])
    llm = LLM.load(args.model, **load_arguments(options))
    service = Service(llm, ServeConfig(names=("x",)))
    config = uvicorn.Config(make_app(service), log_config=None, access_log=False, port=0)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    bodies = make_bodies(args.requests, args.max_tokens)
    prompts = [body["prompt"] for body in bodies]
    params = [
        SamplingParams(max_tokens=args.max_tokens, seed=body["seed"], ignore_eos=True, logprobs=0) for body in bodies
    ]

    def alone() -> list[list[int]]:
        llm.clear_prefix_cache()
        outputs = llm.generate(prompts, params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    rates: dict[str, list[float]] = {"engine": [], "http": []}
    cpu_s: dict[str, list[float]] = {"engine": [], "http": []}  # of this process, which other work cannot slow down
    loop_s: list[float] = []  # of the event loop's thread alone, while HTTP is served
    steps: dict[str, list[int]] = {"engine": [], "http": []}

    async def count_steps() -> int:
        return (await service.engine.call(llm.stats)).num_steps

    wanted = await service.engine.call(alone)
    num_compiles = (await service.engine.call(llm.stats)).num_compiles
    for _ in range(args.rounds):
        num_steps = await count_steps()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        assert await service.engine.call(alone) == wanted
        rates["engine"].append(args.requests * args.max_tokens / (time.perf_counter() - start_s))
        cpu_s["engine"].append(time.process_time() - start_cpu_s)
        steps["engine"].append(-num_steps + (num_steps := await count_steps()))
        await service.engine.call(llm.clear_prefix_cache)
        start_cpu_s, start_loop_s = time.process_time(), time.thread_time()
        # The clients are a process of their own, as clients are.
        client = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "clients", "-m", args.model, "--port", str(port), "--requests", str(args.requests),
            "--max-tokens", str(args.max_tokens), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await client.communicate()
        told = json.loads(out)
        assert told["tokens"] == wanted, "the streams are not what the engine makes"
        rates["http"].append(args.requests * args.max_tokens / told["seconds"])
        cpu_s["http"].append(time.process_time() - start_cpu_s)
        loop_s.append(time.thread_time() - start_loop_s)
        steps["http"].append(await count_steps() - num_steps)
    assert (await service.engine.call(llm.stats)).num_compiles == num_compiles, "something was compiled in between"
    server.should_exit = True
    await running
    rounds = {name: [round(each, 2) for each in values] for name, values in rates.items()}
    used = {name: [round(each, 2) for each in values] for name, values in cpu_s.items()}
    ratio = statistics.median(http / engine for engine, http in zip(rounds["engine"], rounds["http"], strict=True))
    cpu = [round(http / engine - 1, 4) for engine, http in zip(used["engine"], used["http"], strict=True)]
    return {
        "tokens_per_s": rounds, "cpu_s": used, "steps": steps, "loop_cpu_s": [round(each, 3) for each in loop_s],
        "overhead": round(1 - ratio, 4), "cpu_overhead": cpu,
    }  # fmt: skip


async def clients(args: argparse.Namespace) -> dict[str, Any]:
    """Streams all requests at once; the time is that from the first byte sent to the last one read."""
    server = ServerProcess.__new__(ServerProcess)
    server.host, server.port = "127.0.0.1", args.port
    start_s = time.perf_counter()
    tokens = await asyncio.gather(*(stream(server, body) for body in make_bodies(args.requests, args.max_tokens)))
    return {"seconds": time.perf_counter() - start_s, "tokens": tokens}


async def crowd(args: argparse.Namespace, load: list[str]) -> dict[str, Any]:
    """Many clients for a while; what is wrong raises."""
    server = ServerProcess([args.model, "--warm-up", *load])
    try:
        bodies = make_bodies(16, args.max_tokens)
        wanted = [await stream(server, body) for body in bodies]  # each alone
        assert all(len(ids) == args.max_tokens for ids in wanted)
        memory, counts = [], {"whole": 0, "hung_up": 0}
        end_s = time.monotonic() + args.seconds

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end_s:
                which = rng.randrange(len(bodies))
                leaves = rng.random() < 1 / 3
                ids = await stream(server, bodies[which], rng.randrange(1, args.max_tokens) if leaves else None)
                assert ids == wanted[which][: len(ids)], "a token was lost, doubled or changed"
                assert leaves or len(ids) == args.max_tokens
                counts["hung_up" if leaves else "whole"] += 1

        async def watch() -> None:
            while time.monotonic() < end_s:
                await asyncio.sleep(args.seconds / 24)
                memory.append(server.rss_mb())

        await asyncio.gather(watch(), *(client(number) for number in range(args.clients)))
        used = -1.0
        for _ in range(100):
            used = await asyncio.to_thread(server.metric, "jaxkv:pages_used")
            if used == 0:
                break
            await asyncio.sleep(0.1)
        assert used == 0, f"{used} pages are still in use"
        half = len(memory) // 2
        growth = statistics.mean(memory[-3:]) - statistics.mean(memory[half : half + 3])
        result = {**counts, "rss_mb": [round(each) for each in memory], "growth_mb_second_half": round(growth, 1)}
    finally:
        status = server.stop()
    assert status == 0, status
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "crowd", "clients"])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--port", type=int, default=0, help="of `clients`, which `overhead` starts")
    args, load = parser.parse_known_args()  # the rest are options of `jaxkv serve`
    if args.what == "clients":
        print(json.dumps(asyncio.run(clients(args))))
        return
    result = asyncio.run(overhead(args, load) if args.what == "overhead" else crowd(args, load))
    print(json.dumps({"bench": args.what, **vars(args), "options": load, **result}))


if __name__ == "__main__":
    main()
