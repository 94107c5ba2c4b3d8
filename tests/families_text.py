"""Tokenizers in the shape of published families: the demo's, with their control tokens and a
template written for these tests."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from engines import DEMO

from exo_node.shard.text.codec import TextCodec

TEMPLATES = Path(__file__).parent / "templates"
TOKENS: dict[str, tuple[str, ...]] = {
    "qwen": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "qwen_levels": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm": (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<sop>", "[gMASK]", "<|user|>"),
        *("<|assistant|>", "<|system|>", "<|observation|>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    ),
    "deepseek": (
        *("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),  # noqa: RUF001
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),  # noqa: RUF001
    ),
    "gpt_oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}


@cache
def folder_of(family: str) -> Path:
    """A folder with the tokenizer of a family."""
    folder = Path(mkdtemp(prefix=f"exo-{family}-"))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        _ = shutil.copy(DEMO / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    some: dict[str, Any] = tokenizer["added_tokens"][0]
    for number, content in enumerate(TOKENS[family]):
        special = content not in ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer["added_tokens"].append(
            {**some, "id": 4096 + number, "content": content, "special": special}
        )
    _ = (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    _ = (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _ = shutil.copy(TEMPLATES / f"{family}.jinja", folder / "chat_template.jinja")
    return folder


@cache
def codec_of(family: str) -> TextCodec:
    return TextCodec.load(folder_of(family))


def divided(text: str, sizes: Sequence[int]) -> list[str]:
    parts: list[str] = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    return [*parts, text]
