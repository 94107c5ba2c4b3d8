"""Any OpenAI server under load, or two against each other: TTFT, inter-token times, tokens/s.

    python bench/serve.py --server ours=http://127.0.0.1:52415 \\
        --server mlx-lm=http://127.0.0.1:8080 [--concurrency 1,4,8,16,32] \\
        [--workloads 32,512,4096,agent,questions] [--output-tokens 64] \\
        [--repeats 3] [--output FOLDER]

Clients in a closed loop: each has one request in flight. Every run of the first server has one of
each other server beside it, with the same questions, in an order that rotates; ratios are taken
within a repeat. Questions are new in every repeat. Names are those of `vllm bench serve`.

`--extra-body '{"ignore_eos": true}'` makes answers equally long where the server knows that field,
`'{"logit_bias": {"4095": -100}}'` where 4095 is the model's end token. Their lengths are printed.
Ends with status 1 if a request failed, with 2 if a server cannot be used.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_client import Server
from serve_metrics import Run
from serve_output import tables, write
from serve_plot import draw
from serve_runs import BenchPlan, Unusable, measure, only_model
from serve_workloads import AGENT, QUESTIONS, Role, Workload


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        return asyncio.run(_bench(options))
    except KeyboardInterrupt:
        return 130
    except Unusable as fault:
        print(fault, file=sys.stderr)
        return 2


async def _bench(options: argparse.Namespace) -> int:
    servers = [await _server(options, name, url) for name, url in options.server]
    plan = BenchPlan(
        tuple(servers),
        tuple(_workload(options, name) for name in options.workloads),
        options.concurrency,
        options.repeats,
        options.requests,
        options.output_tokens,
        options.seed,
        options.silence,
    )
    facts = _facts(options, servers)
    runs: list[Run] = []
    try:
        async for run in measure(plan):
            runs.append(run)
            _print_run(run)
            if options.output:
                write(options.output, facts, runs)
    finally:  # an interrupted bench prints its results so far
        for line in tables(runs, [server.name for server in servers]) if runs else ():
            print(line)
    if options.output:
        drawn = draw(runs, f"{platform.machine()} {platform.system()}", options.output)
        print(drawn if isinstance(drawn, str) else f"\nwritten to {options.output}")
    return 1 if any(answer.error for run in runs for answer in run.answers) else 0


def _print_run(run: Run) -> None:
    good = sum(not answer.error for answer in run.answers)
    run_text = f"{run.workload}, {run.concurrency} clients, {run.server}, repeat {run.repeat + 1}"
    print(f"{run_text}: {good} of {len(run.answers)} in {run.duration:.1f} s", file=sys.stderr)


async def _server(options: argparse.Namespace, name: str, url: str) -> Server:
    body: dict[str, Any] = {"temperature": options.temperature, **options.extra_body}
    headers: dict[str, str] = {}
    if variable := dict(options.key).get(name):
        if variable not in os.environ:
            raise Unusable(f"--key {name}={variable}: there is no such environment variable")
        headers["Authorization"] = f"Bearer {os.environ[variable]}"
    root = url.rstrip("/").removesuffix("/v1")
    server = Server(name, root, dict(options.model).get(name, ""), body, headers)
    if server.model:
        return server
    model = await only_model(server, options.silence)
    return Server(name, root, model, body, headers)


def _workload(options: argparse.Namespace, name: str) -> Workload:
    if name == QUESTIONS:
        return Workload(QUESTIONS, questions=options.questions)
    if name == AGENT:
        role: Role = options.tool_role
        turns, tool = options.turns, options.tool_tokens
        return Workload(AGENT, options.system_tokens, turns=turns, tool_tokens=tool, tool_role=role)
    return Workload(f"{name} tokens", int(name))


def _facts(options: argparse.Namespace, servers: Sequence[Server]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "servers": {each.name: {"url": each.url, "model": each.model} for each in servers},
        "output_tokens_asked": options.output_tokens,
        "extra_body": options.extra_body,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not (name and mark and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_at_least_one(each) for each in text.split(","))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _workloads(text: str) -> tuple[str, ...]:
    for each in text.split(","):
        if each not in (AGENT, QUESTIONS) and not (each.isdecimal() and int(each)):
            allowed = f"a number of tokens, {AGENT} or {QUESTIONS}"
            raise argparse.ArgumentTypeError(f"{each!r} is not {allowed}")
    return tuple(dict.fromkeys(text.split(",")))


def _lines(file: str) -> tuple[str, ...]:
    try:
        lines = tuple(line for line in Path(file).read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as fault:
        raise argparse.ArgumentTypeError(f"{file}: {fault}") from None
    if not lines:
        raise argparse.ArgumentTypeError(f"{file} has no line")
    return lines


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(f"no JSON: {fault}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object")
    return value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    _ = add("--server", type=_pair, action="append", required=True, metavar="NAME=URL")
    _ = add("--model", type=_pair, action="append", default=[], metavar="NAME=ID")
    _ = add("--key", type=_pair, action="append", default=[], metavar="NAME=VARIABLE")
    _ = add("--concurrency", type=_numbers, default=(1, 4, 8, 16, 32))
    _ = add("--workloads", type=_workloads, default=("32", "512", "4096", AGENT))
    _ = add("--output-tokens", type=_at_least_one, default=64)
    _ = add("--requests", type=_at_least_one, default=16, help="of a run, one a client at least")
    _ = add("--repeats", type=_at_least_one, default=3)
    _ = add("--seed", type=int, default=1)
    _ = add("--temperature", type=float, default=0.0)
    _ = add("--extra-body", type=_object, default={}, help="JSON, into every request")
    _ = add("--silence", type=float, default=600.0, help="seconds without a byte, then failed")
    _ = add("--questions", type=_lines, help="file with one a line, for the workload `questions`")
    _ = add("--system-tokens", type=_at_least_one, default=2048, help="of an agent")
    _ = add("--turns", type=_at_least_one, default=4, help="of an agent")
    _ = add("--tool-tokens", type=_at_least_one, default=256, help="of a tool's result")
    _ = add("--tool-role", choices=("tool", "user"), default="tool", help="of a tool's result")
    _ = add("--output", type=Path, help="folder for JSON, CSV and the figure")
    options = parser.parse_args(arguments)
    if QUESTIONS in options.workloads and not options.questions:
        parser.error(f"--workloads {QUESTIONS} needs --questions FILE")
    names = [name for name, _ in options.server]
    if len({*names}) < len(names):
        parser.error("--server: two have the same name")
    for name in {name for name, _ in (*options.model, *options.key)} - {*names}:
        parser.error(f"--model, --key: there is no server {name!r}")
    return options


if __name__ == "__main__":
    sys.exit(main())
