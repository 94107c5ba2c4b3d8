"""Python source is read in several threads at once, and nothing of it runs."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from exo_node.shard.checkpoint.python_source import literal, statements

TABLE = "{" + ", ".join(f"'{n}': [1, (2, {{3: {n}}})]" for n in range(300)) + "}"


@pytest.fixture
def switching() -> Iterator[None]:
    """Each garbage collection lets other threads run, and there are many of them."""
    before = gc.get_threshold()

    def switch(_phase: str, _info: object) -> None:
        time.sleep(0)

    gc.callbacks.append(switch)
    gc.set_threshold(50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(switch)


@pytest.mark.usefixtures("switching")
def test_threads_that_read_at_once_do_not_disturb_each_other() -> None:
    """Python 3.11 raised SystemError, and a download that had just arrived failed by it."""
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(read, TABLE) for read in (statements, literal) * 20]
    for read in reads:
        assert read.result()


def test_a_literal_is_read_and_nothing_else_is_run() -> None:
    assert literal("{'a': (1, None)}") == {"a": (1, None)}
    for text in ("__import__('os')", "a", "1 if True else 2"):
        with pytest.raises(ValueError, match="malformed"):
            _ = literal(text)
    with pytest.raises(ValueError, match="unhashable"):
        _ = literal("{[]: 1}")
