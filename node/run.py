"""The life of the node's process: nodes one after another, each until a signal or its own end."""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ..placement.errors import InvalidSettings
from .cluster.node_exit import Outcome, RestartWithKey
from .machine.data_dir_lock import DataDirLock
from .machine.hardware import Hardware, detect_hardware
from .machine.log import configure, show, terminal
from .machine.open_files import quiet_accepts, raise_limit
from .machine.own_command import own_command
from .machine.settings import Settings, check_mlx_extras, installed_distributions, visible_gpus
from .machine.tasks import cancel
from .machine.timing import PROFILES
from .node import Node

log = logging.getLogger(__name__)


def run_node(settings: Settings, warnings: Sequence[str]) -> int:
    """`exo-node start`: returns the exit status. Raises InvalidSettings before anything listens."""
    distributions = installed_distributions()
    check_mlx_extras(distributions)
    try:
        configure(settings.log_format, node=settings.name, file=settings.log_file)
    except OSError as fault:
        raise InvalidSettings(f"--log-file: {fault}", param="--log-file") from None
    for warning in warnings:
        log.warning("%s", warning)
    _ = raise_limit()
    hardware = detect_hardware(distributions, settings.memory_limit, visible_gpus())
    if hardware.other_gpus:
        log.warning(
            "this node computes on one GPU; %d more can have a node each: `exo-node start` with "
            "CUDA_VISIBLE_DEVICES=1, --data-dir, --port and --grpc-port of its own "
            "(docs/cluster.md)",
            hardware.other_gpus,
        )
    with DataDirLock.acquire(settings.data_dir) as presence:
        return asyncio.run(_serve(settings, hardware, presence))


async def _serve(settings: Settings, hardware: Hardware, presence: DataDirLock) -> int:
    """A node after another, in one process: each with the cluster key that the last one got."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(quiet_accepts())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    restart = RestartWithKey()
    again = False
    while True:
        async with AsyncExitStack() as stack:
            node = await _started(stack, settings, hardware, restart.peers, again=again)
            local = node.local
            ports = {"port": local.http_port, "grpc_port": local.grpc_port}
            settings = settings.model_copy(update=ports)
            presence.announce(settings.host, local.http_port, settings.models_dirs)
            where = f"http://{settings.host}:{local.http_port}"
            log.info("node %s is ready: %s", settings.name, where)
            if terminal() is not None:  # the link reaches no log
                show(_first_words(node.login_link()))
            outcome = await _ended(node, stop)
            stop.clear()  # a second signal cuts short what still runs
            await _first(node.drain(), stop.wait())
        if isinstance(outcome, int):
            return outcome
        restart, again = outcome, True


def _first_words(link: str) -> str:
    """Commands with which a person at the terminal begins. The link is for this person alone."""
    return (
        f"The dashboard, by a link that is valid once, for five minutes:\n  {link}\n"
        f'A question, in another terminal:\n  {own_command()} chat "Tell me a story."'
    )


async def _started(
    stack: AsyncExitStack,
    settings: Settings,
    hardware: Hardware,
    peers: Sequence[str],
    *,
    again: bool,
) -> Node:
    """A node that serves, closed with the stack; the ports of one that just ended may take a
    moment to be free `again`. Raises InvalidSettings."""
    timing = PROFILES[settings.timing]
    deadline = time.monotonic() + (timing.grace_s if again else 0)
    while True:
        node = Node(settings, hardware, peers)
        try:
            await node.start()
        except InvalidSettings as fault:
            await node.close()
            if time.monotonic() >= deadline:
                if not again or fault.param != "--grpc-port" or not settings.grpc_port:
                    raise
                # The others learn the new one; HTTP has to stay where its clients look for it.
                log.warning("the node-to-node port %d is taken now", settings.grpc_port)
                settings = settings.model_copy(update={"grpc_port": 0})
            await asyncio.sleep(timing.tick_s)
            continue
        _ = stack.push_async_callback(node.close)
        return node


async def _ended(node: Node, stop: asyncio.Event) -> Outcome:
    """Waits for a signal to stop (0), or until the node has to end by itself."""
    stopping = asyncio.create_task(stop.wait())
    try:
        _ = await asyncio.wait({stopping, node.outcome}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        _ = stopping.cancel()
    if node.outcome.done():
        return node.outcome.result()
    log.info("stopping")
    return 0


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Runs them together until one ends, raises its error, and cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await cancel(tasks)
