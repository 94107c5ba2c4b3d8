"""Scripted models with publishers' templates, which call tools as each format spells calls.

The templates are read from `CHAT_TEMPLATES` (`tests/published_templates.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from call_spellings import SPELLINGS
from models import DEMO
from published_templates import published_templates
from scripted import write_checkpoint

Call = tuple[str, Mapping[str, Any]]
_BREAK = "\ufdd0"
_BREAKS = r"\ufdd0|\\ufdd0"
"""Divides a mark that is ordinary text, as publishers' tokenizers are given it in a message."""
_LEAST = 4
"""Characters of a token that is no control token: shorter ones would be in every text."""
_VOCABULARY = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
"""The demo's, in which each token of a script would keep its id."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A publisher's template, by the end of its file's name, and how its model writes.

    `control`: its control tokens, and whether each is flagged as special. `thought`, `text`: what
    the model writes before its calls and before its last text. `ends`: tokens that end an answer.
    `joins`: makes several calls one answer. `is_single`: whether an answer has one call at most.
    """

    template: str
    spell: Callable[[str, Mapping[str, Any]], str]
    control: Mapping[str, bool]
    thought: str = ""
    text: str = ""
    ends: tuple[str, ...] = ()
    joins: Callable[[Sequence[str]], str] = "".join
    is_single: bool = False

    def sample(self, function: str) -> str:
        """Text with the format's marks: each by itself, and a whole call."""
        marks = " and ".join(self.control)
        return f"{marks} from {self.spell(function, {'path': 'x', 'text': 'a'})} the script"

    def steps(self, answers: Sequence[Sequence[Call]], last: str) -> list[list[str]]:
        """The tokens of each answer: its calls, and of the last one, which is `last`."""
        mark = re.compile(
            "|".join(f"{re.escape(m[0])}(?={re.escape(m[1:])})" for m in self.control)
        )

        def broken(value: Any) -> Any:
            return mark.sub(rf"\g<0>{_BREAK}", value) if isinstance(value, str) else value

        texts: list[str] = []
        for number, calls in enumerate(answers):
            spelled = [
                self.spell(name, {n: broken(v) for n, v in arguments.items()})
                for name, arguments in calls
            ]
            texts.append(self.thought.format(number) + self.joins(spelled))
        texts.append(self.text.format(len(texts)) + last)
        return _tokens(texts, self.control)


def _tokens(texts: Sequence[str], control: Mapping[str, bool]) -> list[list[str]]:
    """Divides texts into tokens of which each occurs once: what was there before is joined to what
    comes after it."""
    cut = re.compile(rf"({'|'.join(map(re.escape, control))})|{_BREAKS}")
    used, steps = set[str](_VOCABULARY), list[list[str]]()
    for text in texts:
        step, pending, is_new = list[str](), "", False
        for piece in filter(None, cut.split(text)):
            pending += piece
            is_new = is_new or (piece not in used and (piece in control or len(piece) >= _LEAST))
            used.add(piece)
            if is_new and pending not in _VOCABULARY:
                step.append(pending)
                used.add(pending)
                pending, is_new = "", False
        if pending:
            step[-1:] = ["".join((*step[-1:], pending))]
        steps.append(step)
    assert len({*chain(*steps)}) == sum(map(len, steps))
    return steps


def published_texts() -> dict[str, str]:
    """The templates of `MODELS` that `CHAT_TEMPLATES` has, by the models' names."""
    published = published_templates()
    return {
        name: text
        for name, model in MODELS.items()
        for file, text in published.items()
        if file.endswith(model.template)
    }


def make_published(
    folder: Path,
    model: PublishedModel,
    template: str,
    answers: Sequence[Sequence[Call]],
    last: str,
) -> Path:
    """Writes the checkpoint of a model that gives these answers into `folder`."""
    if model.is_single:
        answers = [[call] for calls in answers for call in calls]
    counts = [len(calls) for calls in answers]
    steps = model.steps(answers, last)
    return write_checkpoint(folder, steps, template, model.control, ends=model.ends, calls=counts)


def _llama(name: str, arguments: Mapping[str, Any]) -> str:
    call = {"name": name, "parameters": dict(arguments)}
    return json.dumps(call, ensure_ascii=False)


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    """The call in an answer, which begins after `<|start|>assistant`."""
    return SPELLINGS["Harmony"](name, arguments).removeprefix("<|start|>assistant")


def _in_one_section(calls: Sequence[str]) -> str:
    """MiniMax's calls: one section has them all."""
    return "".join(calls).replace("</minimax:tool_call><minimax:tool_call>\n", "")


def _special(*tokens: str) -> dict[str, bool]:
    return dict.fromkeys(tokens, True)


def _ordinary(*tokens: str) -> dict[str, bool]:
    return dict.fromkeys(tokens, False)


_THINK = "Step {}.\n</think>\n\n"
MODELS = {
    "mistral": PublishedModel(
        "/Mistral-Small-3.2-24B-Instruct-2506.jinja",
        SPELLINGS["mistral"],
        _special(
            *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[TOOL_CONTENT]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
    ),
    "gemma": PublishedModel(
        "/google-gemma-4-31B-it.jinja",
        SPELLINGS["gemma4"],
        _special(
            *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"),
            *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
        ),
        ends=("<turn|>", "<|tool_response>"),
    ),
    "llama": PublishedModel(
        "/meta-llama-Llama-3.1-8B-Instruct.jinja",
        _llama,
        _special(
            *("<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|eom_id|>",
        ),
        ends=("<|eot_id|>", "<|eom_id|>"),
        joins="; ".join,
    ),
    "qwen": PublishedModel(
        "/qwen3_8.jinja",
        SPELLINGS["qwen3_coder"],
        _ordinary(
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<think>",
            "</think>",
        ),
        thought=_THINK,
        text=_THINK,
        joins="\n".join,
    ),
    "gpt-oss": PublishedModel(
        "/openai-gpt-oss-120b.jinja",
        _harmony,
        _special(
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
            "<|constrain|>",
        ),
        thought="<|channel|>analysis<|message|>Step {}.<|end|><|start|>assistant",
        text="<|channel|>analysis<|message|>Step {}.<|end|><|start|>assistant"
        "<|channel|>final<|message|>",
        ends=("<|call|>", "<|return|>"),
        is_single=True,
    ),
    "minimax": PublishedModel(
        "/MiniMax-M2.jinja",
        SPELLINGS["minimax_m2"],
        _ordinary("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
        | _special("]~b]", "]~!b[", "[e~["),
        thought=_THINK,
        text=_THINK,
        ends=("[e~[",),
        joins=_in_one_section,
    ),
}
