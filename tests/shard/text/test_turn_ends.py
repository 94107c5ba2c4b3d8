"""The prompts of a chat's turns are read by the same forwards in every family, so that the next one
begins after the first's rows."""

import json
import shutil
from pathlib import Path

import pytest
from families_text import codec_of, folder_of

from exo_node.mtp.schedule import Schedule
from exo_node.shard.text.codec import TextCodec

WORDS = " ".join(f"word{number}" for number in range(40))
ASKED = [{"role": "user", "content": WORDS}]
CHUNK = 4096


def common_rows(codec: TextCodec) -> tuple[int, int]:
    """The rows of a first turn's prompt, and those of which the next turn finds the state."""
    answered = [*ASKED, {"role": "assistant", "content": "So."}, {"role": "user", "content": "On."}]
    first, following = (codec.encode_chat(chat) for chat in (ASKED, answered))
    schedule = Schedule(CHUNK, codec.turn_ends)
    inner = [{*schedule.ends(prompt)[:-1]} for prompt in (first, following)]
    common = max(inner[0] & inner[1], default=0)
    assert first[:common] == following[:common]
    return len(first), common


@pytest.mark.parametrize("family", ["qwen", "glm", "deepseek", "gpt_oss"])
def test_a_short_first_prompt_ends_a_forward_near_its_end(family: str) -> None:
    rows, common = common_rows(codec_of(family))
    assert rows - common < 8


def test_a_prompt_of_mistral_ends_a_forward_after_its_system_message(tmp_path: Path) -> None:
    """Its last token, `[/INST]`, is one whose logits are needed."""
    folder = tmp_path / "mistral"
    _ = shutil.copytree(folder_of("qwen"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    marks = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
    some = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**some, "id": 4200 + number, "content": mark} for number, mark in enumerate(marks)
    ]
    _ = (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    _ = (folder / "chat_template.jinja").write_text(
        f"[SYSTEM_PROMPT]{WORDS}[/SYSTEM_PROMPT]{{% for m in messages %}}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    rows, common = common_rows(TextCodec.load(folder))
    assert rows / 3 < common < rows
