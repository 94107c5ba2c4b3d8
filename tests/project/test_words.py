"""Errors and log lines that must not mislead: their statements are true and their remedies help."""

import ast
import logging
import re
import tomllib
from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from exo_node.node.api.http.bodies import StrictBody, parse_body
from exo_node.node.api.http.errors import fault_of, unnamed_fault
from exo_node.node.cli.main import app
from exo_node.node.cluster.exchanges import Dial, log_failure
from exo_node.node.rpc.channels import from_status
from exo_node.node.store.library import ModelLibrary
from exo_node.node.trust.cluster_key import KeyFolder
from exo_node.placement.drafting import undeclared_reason
from exo_node.placement.errors import (
    ExoNodeError,
    InsufficientMemory,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    PeerLost,
)
from exo_node.placement.ids import ModelId

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["nothing-like-it", "demp"])
def test_an_unknown_models_error_is_one_sentence_after_the_other(model: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        _ = ModelLibrary(offline=True).get(ModelId(model))
    assert "`exo-node models` lists those that are" in caught.value.message
    assert "`exo-node models recommend`" in caught.value.message
    assert (
        f"is on this machine. {'Did you mean demo? ' * (model == 'demp')}`exo"
        in caught.value.message
    )


PATHS = ("/", "/v1/chat/completions", "/v1/models", "/v1/models/{id:path}", "/health/live")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/rerank", None),
        ("/", None),
        ("/favicon.ico", None),
    ],
)
def test_a_path_that_is_not_served_names_the_nearest_or_nothing(
    path: str, near: str | None
) -> None:
    message = unnamed_fault(404, path, PATHS).message
    nearest = f"; the nearest that it serves is {near}" if near else ""
    assert message == f"this node does not serve {path}{nearest}"


class _Body(StrictBody):
    temperature: float = 1.0
    moderation: bool = False


@pytest.mark.parametrize(("field", "near"), [("temprature", "'temperature'"), ("echo", None)])
def test_only_a_field_that_is_near_is_called_the_nearest(field: str, near: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = parse_body(f'{{"{field}": 1}}'.encode(), _Body)
    nearest = re.search("the nearest that it knows is (.*)", caught.value.message)
    assert (nearest[1] if nearest else None) == near


def test_an_error_about_memory_that_no_node_has_asks_for_no_retry() -> None:
    assert fault_of(InsufficientMemory("needs 68 GB")).headers == (("x-should-retry", "false"),)
    assert ("Retry-After", "30") in fault_of(LoadFailed("it ended")).headers


def test_why_a_card_does_not_draft_fits_on_one_line() -> None:
    reason = undeclared_reason(ModelId("mine"))
    assert "\n" not in reason
    assert "`exo-node models graft` adds it" in reason


def _handshake_fault(detail: str) -> ExoNodeError:
    at = grpc.aio.Metadata()
    fault = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, at, at, details=detail)
    return from_status(fault, "10.0.0.2:1")


@pytest.mark.parametrize(
    ("fault", "level", "text"),
    [
        (_handshake_fault("CERTIFICATE_VERIFY_FAILED: self-signed"), logging.INFO, "may ask"),
        (
            _handshake_fault("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid"),
            logging.WARNING,
            "compare the clocks",
        ),
        (PeerLost("no answer"), logging.WARNING, "no answer"),
    ],
    ids=["another cluster", "a clock", "gone"],
)
def test_a_joining_nodes_first_contact_is_no_warning(
    fault: ExoNodeError, level: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log_failure(Dial("10.0.0.2:1", None, 1.0), fault)
    [record] = caplog.records
    assert record.levelno == level
    assert text in record.getMessage()
    assert record.getMessage().count("10.0.0.2:1") == 1


def test_leave_asks_or_needs_yes(tmp_path: Path) -> None:
    before = KeyFolder(tmp_path).load().text
    refused = CliRunner().invoke(app, ["leave", "--data-dir", str(tmp_path)])
    assert (refused.exit_code, KeyFolder(tmp_path).load().text) == (2, before)
    assert "--yes" in refused.output
    result = CliRunner().invoke(app, ["leave", "--yes", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert KeyFolder(tmp_path).load().text != before


FORBIDDEN_UNITS = re.compile(r"[KMGT]iB\b|\blayers? \[")
"""Binary units, and half-open ranges of layers: people read GB, and "layers 0-15"."""


def test_what_people_read_has_one_unit_and_one_way_to_name_layers() -> None:
    pages = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "dashboard" / "static").glob("*.js")]
    for page in pages:
        assert FORBIDDEN_UNITS.search(page.read_text()) is None, page.name
    rooms = [ROOT / room for room in ("node", "placement", "shard", "mtp")]
    for file in (file for room in rooms for file in room.rglob("*.py")):
        if "models/demo" in file.as_posix():
            continue  # the demo's recipe and data
        if FORBIDDEN_UNITS.search(source := file.read_text()):
            assert [text for text in message_texts(source) if FORBIDDEN_UNITS.search(text)] == [], (
                file.name
            )


def message_texts(source: str) -> list[str]:
    """The string constants of a module without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in silent)
    return [node.value for node in texts if isinstance(node.value, str)]


def test_uvicorn_whose_internals_are_used_has_an_upper_bound() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [uvicorn] = [each for each in needed if each.startswith("uvicorn")]
    assert "<" in uvicorn, "connection_limits.py builds on H11Protocol"
