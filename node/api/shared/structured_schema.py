"""The form that a request wants its answer in, in every dialect, as one grammar."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints, model_validator

from ....proto.peer_pb2 import Grammar
from ..http.bodies import StrictBody
from ..http.strict_json import encode
from .inputs_schema import wrong

MAX_GRAMMAR: Final = 8 << 10
"""Characters of a regular expression or a Lark grammar, as the runner bounds them."""
_ANY_OBJECT: Final = '{"type": "object"}'

Schema = dict[str, Any]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR)]


class NamedSchema(StrictBody):
    """A schema is enforced whether it is `strict` or not; `strict` refuses what cannot be."""

    name: Annotated[str | None, Field(max_length=256)] = None
    description: str | None = None
    json_schema: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's, of chat completions, and the form of other servers, with `schema` beside `type`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    plain_schema: Annotated[Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if self.type == "json_object" and self.json_schema is None:
            return self
        schemas = [each for each in (self.json_schema, self.plain_schema) if each is not None]
        if len(schemas) != (self.type == "json_schema"):
            raise wrong(".json_schema", "belongs to the type 'json_schema', which needs it")
        return self

    def grammar(self, field: str) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case _ if self.json_schema is None:
                return schema_grammar(self.plain_schema, field)
            case _:
                named = self.json_schema
                return schema_grammar(named.json_schema, field, strict=named.strict is True)


def schema_grammar(schema: Schema | None, field: str, *, strict: bool = False) -> Grammar:
    """The grammar of a schema, or of any JSON object if it is None."""
    text = _ANY_OBJECT if schema is None else encode(schema).decode()
    return Grammar(kind="json_schema", text=text, field=field, strict=strict)


def one_grammar(call: Grammar | None, form: Grammar | None, ignored: list[str]) -> Grammar | None:
    """The call that a request insists on, or else the form of its text.

    OpenAI allows both at once, and instructor sends both: then the answer has no text.
    """
    if call is not None and form is not None:
        ignored.append(f"{form.field} (tool_choice insists on a call)")
    return call or form
