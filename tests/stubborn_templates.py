"""Small templates, each of which refuses or loses what some published ones do."""

from collections.abc import Mapping
from typing import Final

_TURN: Final = "<{{ m.role }}>{{ m.content }}"
_CALLS: Final = "{% for c in m.tool_calls %}[{{ c.function.arguments | tojson }}]{% endfor %}"
_EACH: Final = "{% for m in messages %}"
_ANSWER: Final = "{% if add_generation_prompt %}<assistant>{% endif %}"
_ALL: Final = f"{_EACH}{_TURN}{_CALLS}{{% endfor %}}{_ANSWER}"


def _refusing(condition: str, why: str = "refused") -> str:
    """Refuses a chat with a message `m` of which the condition is true."""
    check = f"{{% if {condition} %}}{{{{ raise_exception('{why}') }}}}{{% endif %}}"
    return f"{_EACH}{check}{{% endfor %}}{_ALL}"


TURNS: Final = """{% set ns = namespace(n=0) %}{% for m in messages %}
{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{% if m.role != 'tool' and m.role != 'system' and not m.tool_calls %}
{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"""
"""The check of Mistral's templates, which leaves out calls and results."""

STUBBORN: Final[Mapping[str, str]] = {
    "takes all": _ALL,
    "turns": TURNS + _ALL,
    "turns, and no empty ones of the assistant": TURNS
    + _refusing("m.role == 'assistant' and not m.content.strip() and not m.tool_calls"),
    "no empty turns of the assistant": _refusing(
        "m.role == 'assistant' and not m.content.strip() and not m.tool_calls"
    ),
    "turns, and text beside calls is lost": TURNS
    + f"{_EACH}{{% if m.tool_calls %}}{_CALLS}{{% else %}}{_TURN}{{% endif %}}{{% endfor %}}",
    "turns of two roles": _refusing(
        "m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0)"
    ),
    "no system message": _refusing("m.role == 'system'"),
    "a late system message is lost": (
        f"{_EACH}{{% if loop.first or m.role != 'system' %}}{_TURN}{_CALLS}{{% endif %}}"
        f"{{% endfor %}}{_ANSWER}"
    ),
    "system messages come first": (
        f"{_EACH}{{% if m.role == 'system' %}}{_TURN}{{% endif %}}{{% endfor %}}"
        f"{_EACH}{{% if m.role != 'system' %}}{_TURN}{_CALLS}{{% endif %}}{{% endfor %}}{_ANSWER}"
    ),
    "system messages come first and again": (
        f"{_EACH}{{% if m.role == 'system' %}}{_TURN}{{% endif %}}{{% endfor %}}{_ALL}"
    ),
    "the system message is in a user's last turn": (
        f"{_EACH}{{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}}"
        f"{{{{ messages[0].content }}}}{{% endif %}}"
        f"{{% if m.role != 'system' %}}{_TURN}{_CALLS}{{% endif %}}{{% endfor %}}"
    ),
    "one call in a turn": _refusing("m.tool_calls and m.tool_calls | length > 1", "single calls"),
    "one call in a turn, without its text": _EACH
    + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + f"{{% if m.tool_calls %}}{_CALLS}{{% else %}}{_TURN}{{% endif %}}{{% endfor %}}{_ANSWER}",
    "the first call is rendered, and results need one": (
        "{% set ns = namespace(call=false) %}" + _EACH + "{% if m.role == 'tool' and not ns.call %}"
        "{{ raise_exception('no call before') }}{% endif %}{% set ns.call = m.role == 'tool' %}"
        f"{_TURN}{{% if m.tool_calls %}}{{% set ns.call = true %}}"
        "[{{ m.tool_calls[0].function.arguments | tojson }}]{% endif %}{% endfor %}" + _ANSWER
    ),
    "a text beside thoughts and a call is refused": _refusing(
        "m.tool_calls and m.reasoning_content and m.content"
    ),
    "a user is needed": (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}" + _ALL
    ),
    "calls are lost": (
        f"{_EACH}{{% if not m.tool_calls %}}{_TURN}{{% endif %}}{{% endfor %}}{_ANSWER}"
    ),
    "results need names": _refusing("m.role == 'tool' and not m.name"),
    "results need calls": _refusing(
        "m.role == 'tool' and not (loop.previtem and "
        "(loop.previtem.tool_calls or loop.previtem.role == 'tool'))"
    ),
    "calls have no content": _refusing("m.tool_calls and m.content is not none"),
    "ids have nine letters or digits": (
        f"{_EACH}{{% for c in m.tool_calls or [m] if c.id is defined or m.tool_calls or "
        "m.role == 'tool' %}{% set id = c.id or c.tool_call_id %}"
        "{% if id is not defined or id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
        f"{{% endfor %}}{{% endfor %}}{_ALL}"
    ),
    "arguments are text": _ALL.replace(
        "c.function.arguments | tojson", "'a' + c.function.arguments"
    ),
    "contents are parts": _ALL.replace(
        "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
    ),
    "no tools at all": f"{_EACH}{_TURN}{{% endfor %}}{_ANSWER}",
}
