"""The node's terminal, a pseudo-terminal here: the link to the dashboard, and joining."""

import os
import pty
import re
import select
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from nodes import eventually, free_ports, node, on_loopback, start_process

WITHIN_S = 60.0


class _Terminal:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def read(self) -> str:
        """Everything that was printed until now."""
        while select.select([self._descriptor], [], [], 0.05)[0]:
            try:
                self.text += os.read(self._descriptor, 65536).decode().replace("\r\n", "\n")
            except OSError:  # the other end is closed
                break
        return self.text

    def wait_for(self, pattern: str) -> re.Match[str]:
        eventually(lambda: re.search(pattern, self.read()), WITHIN_S)
        match = re.search(pattern, self.text)
        assert match is not None
        return match


@contextmanager
def _node_on_a_terminal(data_dir: Path, *flags: str) -> Generator[_Terminal]:
    main, side = pty.openpty()
    process = start_process(data_dir, *flags, terminal=side)
    os.close(side)
    try:
        yield _Terminal(main)
    finally:
        process.kill()
        _ = process.wait()
        os.close(main)


def _redeem(link: str) -> int:
    port, ticket = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#login=(\S+)", link).groups()  # pyright: ignore[reportOptionalMemberAccess]
    connection = on_loopback(int(port), 30)
    connection.request(
        "POST",
        "/v1/session",
        body=f'{{"ticket": "{ticket}"}}',
        headers={"Content-Type": "application/json", "Host": f"127.0.0.1:{port}"},
    )
    with closing(connection), connection.getresponse() as response:
        return response.status


def test_a_terminal_gets_a_link_that_is_valid_once(tmp_path: Path) -> None:
    with _node_on_a_terminal(tmp_path / "mini", "--no-mdns") as terminal:
        link = terminal.wait_for(r"http://\S+/#login=\S+").group()
        assert [_redeem(link), _redeem(link)] == [200, 400]
        time.sleep(0.3)
        assert terminal.read().count("#login=") == 1


def test_a_file_gets_no_link_even_in_the_format_for_people(tmp_path: Path) -> None:
    with node(tmp_path / "mini", "--no-mdns", "--log-format", "human") as running:
        eventually(lambda: "is ready" in running.log.read_text(), WITHIN_S)
        assert "login" not in running.log.read_text()


def test_joining_is_one_block_on_a_terminal(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with (
        _node_on_a_terminal(tmp_path / "studio", "--no-mdns", "--grpc-port", str(port)) as studio,
        _node_on_a_terminal(tmp_path / "mini", "--no-mdns", "--peer", f"127.0.0.1:{port}") as mini,
    ):
        _ = studio.wait_for("To let one of them in here: .* approve DIGITS NAME")
        this_one = r"To let this one \(mini, \w{8}\) in"
        block = mini.wait_for(this_one + r", run there: .* approve (\d+ \d+)")
        time.sleep(1)
        text = mini.read()
        assert text.count(block.group(1)) == 1
        assert "asks to join" not in text + studio.read()
