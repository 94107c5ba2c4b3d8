"""Default requests of agents to a real node whose model's template has three efforts only."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from families_text import TEMPLATES
from nodes import Node, node
from small import small_checkpoint

ASK = [{"role": "user", "content": "hi"}]
NOTES = {
    "reasoning effort high (xhigh is the nearest it has)",
    "max_tokens beyond the end of the context",
}
CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "system": [{"type": "text", "text": "You are an agent."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tools": [{"name": "Read", "input_schema": {"type": "object", "properties": {}}}],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "/v1/messages": CLAUDE_CODE,
    "/v1/responses": {
        "input": "hi",
        "reasoning": {"effort": "high"},
        "max_output_tokens": 32_000,
    },
    "/v1/chat/completions": {"messages": ASK, "reasoning_effort": "high", "max_tokens": 32_000},
    "/api/chat": {"messages": ASK, "think": "high", "options": {"num_predict": 32_000}},
}


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    models = tmp_path_factory.mktemp("models")
    folder = shutil.copytree(small_checkpoint(), models / "levels")
    _ = shutil.copy(TEMPLATES / "qwen_levels.jinja", folder / "chat_template.jinja")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    _ = (folder / "tokenizer_config.json").write_text(json.dumps(config))
    data = tmp_path_factory.mktemp("levels")
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(data, *flags) as running:
        placed = {"model": "levels", "context": 512}
        assert running.call("POST", "/v1/placements", placed).status == 200
        yield running


@pytest.mark.parametrize("path", DEFAULTS)
def test_an_agents_defaults_are_answered_and_mapped_values_are_reported(
    levels: Node, path: str
) -> None:
    """Both were a 400 of every request: Qwen3.8's template raises for `high`."""
    body = {"model": "levels", "stream": True, **DEFAULTS[path]}
    connection = levels.connect(levels.port, 300.0)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, text
    assert set((response.getheader("x-exo-node-ignored") or "").split(", ")) == NOTES
    # As a field: a sampled answer may contain the word.
    assert '"error":' not in text.replace('"error":null', "")
