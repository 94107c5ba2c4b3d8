"""Publishers' templates get each text, call and result of each conversation once and in order."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from chat_histories import CONVERSATIONS, ODD_TOOLS, TOOLS, missing, user
from families_text import folder_of
from mlx_lm.tokenizer_utils import load as load_tokenizer  # pyright: ignore[reportUnknownVariableType]
from published_templates import published_templates

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.template import ChatTemplate, TemplateOptions

PUBLISHED = published_templates()
pytestmark = pytest.mark.skipif(
    not PUBLISHED, reason="CHAT_TEMPLATES names no folder with templates: see CONTRIBUTING.md"
)


@cache
def tokenizer() -> Any:
    """One with the marks of thoughts and a BOS token, which templates write."""
    folder = Path(mkdtemp(prefix="exo-published-"))
    _ = shutil.copytree(folder_of("qwen"), folder, dirs_exist_ok=True)
    loaded: Any = load_tokenizer(folder)
    loaded._tokenizer.bos_token, loaded._tokenizer.eos_token = "<s>", "</s>"
    return loaded


def template_of(text: str) -> ChatTemplate:
    tokenizer()._tokenizer.chat_template = text
    return ChatTemplate(tokenizer())


def prompt(one: ChatTemplate, chat: Any, tools: Any) -> str:
    return "".join(one.render(chat, tools, TemplateOptions(), []))


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_conversation_is_rendered_whole(name: str) -> None:
    one = template_of(PUBLISHED[name])
    try:
        plain = prompt(one, [user("hello")], TOOLS)
    except InvalidRequest as refused:
        pytest.skip(f"it is for another program: {refused.message}")
    if "hello" not in plain:
        pytest.skip("it is for no chats")
    for conversation, chat in CONVERSATIONS.items():
        assert (conversation, missing(chat, prompt(one, chat, TOOLS))) == (conversation, [])
    chat = CONVERSATIONS["two rounds"]
    assert missing(chat, prompt(one, chat, ODD_TOOLS)) == []
