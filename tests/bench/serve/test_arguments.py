"""Bad flags of `exo-node bench serve`: one clear error each, before any request."""

import socket

import pytest
from api_stub import in_process

SERVER = ("--server", "x=http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--server", "x"), "'x' is not NAME=URL"),
        (("--server", "x=ftp://a"), "'ftp://a' is no http address"),
        (("--server", "x=http://a:b"), "is no http address"),
        (("--server", "x=http://[::1"), "is no http address"),
        (("--server", "x=http://me:secret@a"), "keys go into --key"),
        (("--server", "<b>=http://a"), "is not NAME=URL"),
        ((*SERVER, *SERVER), "two servers are named 'x'"),
        (
            ("--server", f"{socket.gethostname().split('.')[0].upper()}=http://127.0.0.1:1"),
            "is this machine's name",
        ),
        ((*SERVER, "--server", "y=http://a", "--model", "z=m"), "NAME one of x, y"),
        ((*SERVER, "--model", "x=m", "--model", "x=n"), "'x' has two values"),
        ((*SERVER, "--key", "x=NO_SUCH_KEY"), "no variable 'NO_SUCH_KEY'"),
        (("--key", "x=K"), "the node's own key is EXO_API_KEY"),
        ((*SERVER, "--port", "1"), "--port: it names the node here"),
        ((*SERVER, "--workloads", "32,lots"), "'lots' is none; write questions, agent"),
        ((*SERVER, "--workloads", "0"), "'0' is none"),
        ((*SERVER, "--workloads", "32", "--questions", "f"), "questions is not in --workloads"),
        ((*SERVER, "--questions", "/no/such/file"), "there is no such file"),
        ((*SERVER, "--concurrency", "0"), "whole numbers from 1 to 1024"),
        ((*SERVER, "--concurrency", "1,,2"), "whole numbers from 1 to 1024"),
        ((*SERVER, "--concurrency", "99999"), "whole numbers from 1 to 1024"),
        ((*SERVER, "--temperature", "nan"), "--temperature"),
        ((*SERVER, "--tool-role", "dog"), "write tool or user"),
        ((*SERVER, "--extra-body", "[]"), "it is no JSON object"),
        ((*SERVER, "--extra-body", "{"), "it is no JSON"),
        ((*SERVER, "--extra-body", '{"model": "m"}'), "'model' may not be set here"),
        ((*SERVER, "--repeats", "0"), "--repeats"),
        ((*SERVER, "--limit", "-1"), "--limit"),
    ],
)
def test_a_bad_flag_is_refused_by_name(arguments: tuple[str, ...], output: str) -> None:
    result = in_process("bench", "serve", *arguments)
    assert result.exit_code == 2
    assert output in " ".join(result.output.split())
    assert "Traceback" not in result.output
