"""Choices, log-probabilities of prompts and gaps on a real node, through the official client."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from added_tokens import add_tokens
from engines import STORY
from models import make_checkpoint
from nodes import Node, node
from openai import OpenAI

from exo_node.mtp.schedule import prefill_ends

PROMPT: list[int] = 4 * STORY["prompt_ids"]
"""Turns that are long enough to end a forward."""
TURN_END = 4095
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SAMPLED: dict[str, Any] = {"model": "code", "temperature": 1, "max_tokens": 24}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A random model with the demo's tokenizer, and tokens that mark gaps."""
    folder = tmp_path_factory.mktemp("choices")
    plain = make_checkpoint(
        folder / "plain", "qwen3_5", dtype="float32", vocab=4096, raw=False, seed=7
    )
    code = make_checkpoint(
        folder / "models" / "code", "qwen3_5", dtype="float32", vocab=4112, raw=False, seed=7
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _ = (code / name).write_bytes((plain / name).read_bytes())
    _ = add_tokens(code, FIM)
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(folder / "models"))
    with node(folder / "node", *flags) as running:
        yield running


@pytest.fixture
def client(served: Node) -> Iterator[Any]:
    with ExitStack() as stack:
        base = f"http://127.0.0.1:{served.port}/v1"
        yield stack.enter_context(OpenAI(base_url=base, api_key="any", max_retries=0))


def test_choice_i_is_the_answer_with_the_seed_plus_i_and_the_prompt_is_read_once(
    client: Any,
) -> None:
    create = client.completions.create
    body = create(**SAMPLED, prompt=PROMPT, n=8, seed=40).to_dict()
    cached = sorted(choice["generation_stats"]["cached_tokens"] for choice in body["choices"])
    *_, last_turn, _ = prefill_ends(PROMPT, 256, {TURN_END})
    assert cached == [0, *7 * [last_turn]]
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    alone = [create(**SAMPLED, prompt=PROMPT, seed=40 + i).choices[0].text for i in range(8)]
    assert [choice["text"] for choice in body["choices"]] == alone and len(set(alone)) > 5
    chunks = create(**SAMPLED, prompt=PROMPT, n=8, seed=40, stream=True)
    texts = [""] * 8
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def test_each_choice_has_a_form_and_log_probabilities_of_its_own(client: Any) -> None:
    body = client.chat.completions.create(
        **SAMPLED,
        messages=[{"role": "user", "content": "Hello"}],
        n=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"regex": "[a-z]{3}[0-9]"},
    )
    texts = [choice.message.content for choice in body.choices]
    assert all(len(text) == 4 and text[:3].islower() and text[3].isdigit() for text in texts)
    assert len(set(texts)) > 1
    for choice in body.choices:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_a_runner_that_is_killed_loses_no_choice(served: Node, client: Any) -> None:
    fields: dict[str, Any] = {**SAMPLED, "prompt": PROMPT, "n": 4, "seed": 3, "max_tokens": 200}
    undisturbed = [choice.text for choice in client.completions.create(**fields).choices]
    texts, resumes, killed = [""] * 4, list[int](), False
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.to_dict()["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                resumes.append(choice["generation_stats"]["resumes"])
        if all(texts) and not killed:
            os.kill(_runner(served), signal.SIGKILL)
            killed = True
    assert texts == undisturbed and resumes and max(resumes) == 1


def _runner(served: Node) -> int:
    """The process of the node's only runner."""
    children = psutil.Process(served.process.pid).children()
    (pid,) = [child.pid for child in children if "runner" in " ".join(child.cmdline())]
    return pid
