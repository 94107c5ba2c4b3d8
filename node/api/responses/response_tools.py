"""The tools of a Responses request, as the model calls them and as its client knows them.

To a model each tool is a function of one name. To a client it may have free text as its input, be
in a namespace, or be a search for further tools, which the client runs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ..http.bodies import TolerantBody
from ..shared.tool_schema import MAX_TOOLS, schemas_text, tool_for_template, tool_name

CUSTOM_INPUT: Final = "input"
"""The one argument of the function that represents a custom tool, whose input is free text."""
SEARCH: Final = "tool_search"
CallKind = Literal["function_call", "custom_tool_call", "tool_search_call"]
_KINDS: Final[Mapping[str, CallKind]] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    SEARCH: "tool_search_call",
}
"""The items of calls by the type of their tool; others are run by OpenAI's own servers."""


class ResponsesTool(TolerantBody):
    """A tool, or a namespace with `tools` of its own."""

    type: str
    name: Annotated[str | None, Field(max_length=256)] = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Annotated["list[ResponsesTool] | None", Field(max_length=MAX_TOOLS)] = None
    execution: str | None = None
    """`client` for a search that the client runs."""
    defer_loading: bool | None = None
    """The model learns of it by the result of a search."""

    @property
    def is_callable(self) -> bool:
        """Whether the client runs it."""
        if self.type == SEARCH:
            return self.execution == "client"
        return self.type in _KINDS and bool(self.name)

    def described(self, about: str) -> tuple[str, dict[str, Any] | None]:
        """The description and the schema for a model. `about`: text on several tools."""
        description, parameters = self.description or "", self.parameters
        if self.type == "custom":
            if self.format and self.format.get("definition"):
                description += f"\n\nThe input's grammar:\n{self.format['definition']}"
            text = {"type": "string", "description": "The whole input, as it stands."}
            parameters = {
                "type": "object",
                "properties": {CUSTOM_INPUT: text},
                "required": [CUSTOM_INPUT],
            }
        return f"{description}\n\n{about}".strip() if about else description, parameters


@dataclass(frozen=True, slots=True)
class CallForm:
    """The kind of item in which a client gets the calls of a function, and the tool's own name."""

    kind: CallKind
    name: str
    namespace: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the item that name the tool."""
        if self.kind == "tool_search_call":
            return {"execution": "client"}
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions of a request. `functions` are a chat template's; `forms` are by their names.

    `loaded`: names of deferred functions that a search has found.
    """

    functions: tuple[dict[str, Any], ...]
    forms: Mapping[str, CallForm]
    loaded: frozenset[str]

    def form(self, function: str) -> CallForm:
        return self.forms.get(function) or CallForm("function_call", function)

    def function(self, name: str, namespace: str | None = None) -> str:
        """The function's name of a tool, which need not be one of the request."""
        for function, form in self.forms.items():
            if (form.name, form.namespace) == (name, namespace):
                return function
        return name if namespace is None else _flat_name(namespace, name)

    def schemas(self, results: Sequence[ResponsesTool]) -> str:
        """The result of a search, as the model reads it."""
        own = {tool_name(function): function for function in self.functions}
        leaves = (leaf for leaf in _leaves(results) if leaf.tool.is_callable)
        names = (self.function(leaf.form.name, leaf.namespace) for leaf in leaves)
        return schemas_text(own[name] for name in dict.fromkeys(names) if name in own)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tool that is no namespace. `about`: its namespace's description."""

    tool: ResponsesTool
    namespace: str | None = None
    about: str = ""

    @property
    def form(self) -> CallForm:
        return CallForm(_KINDS[self.tool.type], self.tool.name or SEARCH, self.namespace)


def tool_set(
    declared: Sequence[ResponsesTool], results: Sequence[ResponsesTool], ignored: list[str]
) -> ToolSet:
    """The functions of the tools that a request declares and of those that its searches found.

    Types of dropped tools are appended to `ignored`. Deferred tools are listed like others where
    the client has no search.
    """
    defers = any(tool.type == SEARCH and tool.is_callable for tool in declared)
    leaves, found_leaves = _leaves(declared), _leaves(results)
    dropped = [leaf for leaf in (*leaves, *found_leaves) if not leaf.tool.is_callable]
    ignored += [f"tools[] of type {leaf.tool.type}" for leaf in dropped]
    functions, loaded = dict[str, dict[str, Any]](), set[str]()
    forms = {leaf.form.name: leaf.form for leaf in leaves if _is_plain(leaf)}
    for leaves_of, is_found in ((leaves, False), (found_leaves, True)):
        for leaf in leaves_of:
            if not leaf.tool.is_callable:
                continue
            name = _claim(leaf.form, forms)
            loaded |= {name} if is_found else set()
            deferred = is_found or (defers and leaf.tool.defer_loading is True)
            function = tool_for_template(name, *leaf.tool.described(leaf.about), deferred=deferred)
            _ = functions.setdefault(name, function)
    return ToolSet(tuple(functions.values()), forms, frozenset(loaded))


def _leaves(tools: Iterable[ResponsesTool]) -> list[_Leaf]:
    """The tools and those of namespaces, whose description goes to the first one of each."""
    leaves = list[_Leaf]()
    for tool in tools:
        if tool.type != "namespace":
            leaves.append(_Leaf(tool))
            continue
        for number, own in enumerate(tool.tools or ()):
            about = f"All tools of {tool.name}: {tool.description}" if tool.description else ""
            leaves.append(_Leaf(own, tool.name or "", "" if number else about))
    return leaves


def _is_plain(leaf: _Leaf) -> bool:
    """Whether the function of a tool has the tool's own name."""
    return leaf.tool.type == "function" and leaf.namespace is None and leaf.tool.is_callable


def _claim(form: CallForm, forms: dict[str, CallForm]) -> str:
    """The name of the form's function, which no other has. Adds it to `forms`."""
    name = form.name if form.namespace is None else _flat_name(form.namespace, form.name)
    while forms.setdefault(name, form) != form:
        name += "_"
    return name


def _flat_name(namespace: str, name: str) -> str:
    """The name of a tool in a namespace as Codex itself writes it where it needs one name."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def custom_input(arguments: str) -> str:
    return str(json.loads(arguments).get(CUSTOM_INPUT, ""))
