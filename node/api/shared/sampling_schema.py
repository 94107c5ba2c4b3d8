"""The fields of requests for answers, and the node's own request that they make."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ....mtp.types import Sampling
from ....placement.ids import ModelId, RequestId
from ....placement.sampling_values import API_DEFAULTS
from ....proto import peer_pb2 as pb
from ....proto.fields import filled
from ....proto.peer_pb2 import Grammar
from ...chat.images import gathered
from ...chat.requests import GenerationRequest
from ..http.bodies import StrictBody
from ..http.strict_json import encode
from .inputs_schema import wrong

UINT32: Final = 2**32 - 1
_UINT64: Final = 2**64 - 1
_SAMPLING_FIELDS: Final = tuple(each.name for each in fields(Sampling) if each.name != "logit_bias")
_LEAST_TOP_P: Final = 1e-9

TokenText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""A token's id as the key of a JSON object."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString] | None, Field(max_length=16)]


Stop = Annotated[
    StopStrings,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopString | list[StopString] | None,
    ),
]
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


def none_of_minus_one(value: Any) -> Any:
    return None if isinstance(value, int) and value == -1 else value


_FromMinusOne = Annotated[int | None, Field(ge=-1, le=UINT32)]
NoneOfMinusOne: Final = BeforeValidator(none_of_minus_one, json_schema_input_type=_FromMinusOne)
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MaxTokens = Annotated[int | None, Field(ge=1, le=UINT32), NoneOfMinusOne]
TopK = Annotated[
    int | None,
    Field(ge=0, le=UINT32),
    BeforeValidator(
        lambda value: 0 if value == -1 else value, json_schema_input_type=_FromMinusOne
    ),
]
"""0 is no filter, and so is vLLM's -1."""


class AnswerBody(StrictBody):
    """The fields of every endpoint that answers a prompt."""

    model: ModelName
    stream: bool | None = None
    cache: bool | None = None
    """False: reads all of the prompt, and keeps nothing of it for other requests."""
    loop_guard: bool | None = None
    """False: an answer may repeat itself without end."""

    @property
    def is_background(self) -> bool:
        """Whether its prompt is read after those of others."""
        return False

    @property
    def template_options(self) -> dict[str, Any]:
        return {}

    @property
    def declared(self) -> SimpleNamespace:
        """The schema's fields. A tolerant body has others, too, which nothing has checked."""
        return SimpleNamespace(**{name: getattr(self, name) for name in type(self).model_fields})

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        """The sampling, and the names of the explicit fields: the model has its own for others."""
        return sampling_of(explicit_values(self.declared, _SAMPLING_FIELDS))


class SamplingBody(AnswerBody):
    """Bounds are OpenAI's, mlx-lm's or the wire's."""

    max_tokens: MaxTokens = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: TopK = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_probability: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=0.5)] = None
    seed: Annotated[
        int | None,
        Field(ge=0, le=_UINT64),
        BeforeValidator(
            none_of_minus_one,
            json_schema_input_type=Annotated[int | None, Field(ge=-1, le=_UINT64)],
        ),
    ] = None
    stop: Stop = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    repetition_context_size: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Tokens that all three penalties look at, the prompt's among them; mlx-lm's 20 by default."""
    logit_bias: Annotated[
        dict[TokenText, Annotated[float, Field(ge=-100, le=100)]] | None, Field(max_length=300)
    ] = None
    num_draft_tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    draft_policy: Literal["adaptive", "fixed"] | None = None
    """`adaptive`: `num_draft_tokens` is the most that a round drafts; `fixed`: what each drafts."""
    response_format: ResponseFormat | None = None
    grammar: GrammarText | None = None
    """Lark, as llguidance reads it."""
    regex: GrammarText | None = None
    priority: Literal["interactive", "batch"] | None = None
    service_tier: str | None = None
    """OpenAI's: "flex" is answered after the others, as `priority: "batch"` is."""
    min_tokens: Annotated[int | None, Field(ge=0, le=UINT32)] = None
    """End tokens have probability 0 until the answer has as many tokens."""
    ignore_eos: bool | None = None
    """True: they have probability 0 up to the last token."""

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        forms = [name for name in ("grammar", "regex") if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            forms.insert(0, "response_format")
        if len(forms) > 1:
            raise wrong(forms[1], f"cannot be enforced together with '{forms[0]}'")
        return self

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        most = self.token_limit
        if (self.min_tokens or 0) > (most or UINT32):
            raise wrong("min_tokens", f"should be at most the answer's limit of {most} tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer, or None up to the end of the context."""
        return self.max_tokens

    @property
    def form(self) -> Grammar | None:
        if self.grammar is not None:
            return Grammar(kind="lark", text=self.grammar, field="grammar")
        if self.regex is not None:
            return Grammar(kind="regex", text=self.regex, field="regex")
        response_format = self.response_format
        return None if response_format is None else response_format.grammar("response_format")

    @property
    def is_background(self) -> bool:
        return self.priority == "batch" or (self.priority is None and self.service_tier == "flex")

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        values = explicit_values(self, _SAMPLING_FIELDS)
        if self.logit_bias is not None:
            values["logit_bias"] = tuple((int(id), bias) for id, bias in self.logit_bias.items())
        if self.ignore_eos:
            values["min_tokens"] = UINT32
        return sampling_of(values)


def generation(
    body: AnswerBody,
    id: RequestId,
    prompt: Sequence[Mapping[str, Any]] = (),
    *,
    limits: Mapping[str, Any] | None = None,
    **fields: Any,
) -> GenerationRequest:
    """The request of a body. `prompt`: messages with their images. `limits` and `fields`: those of
    the request's that the dialect has under other names."""
    declared = body.declared
    messages, images = gathered(prompt)
    sampling, explicit_fields = body.sampling()
    drafting = explicit_values(declared, ("num_draft_tokens", "draft_policy"))
    return GenerationRequest(
        id=id,
        model=ModelId(body.model),
        messages=messages,
        images=images,
        sampling=sampling,
        explicit_fields=explicit_fields,
        limits=filled(pb.Limits, declared, **{"ignore_eos": None, **(limits or {})}),
        sharing=filled(pb.Sharing, declared, background=body.is_background),
        options=body.template_options,
        keep_alive_s=getattr(declared, "keep_alive", None),
        **{**drafting, **fields},
    )


def explicit_values(body: object, names: Iterable[str]) -> dict[str, Any]:
    values = ((name, getattr(body, name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def sampling_of(values: Mapping[str, Any]) -> tuple[Sampling, frozenset[str]]:
    """The sampling of explicit fields, and their names: the model has its own for others."""
    sampling = replace(Sampling(temperature=API_DEFAULTS["temperature"]), **values)
    if sampling.top_p == 0:  # to the APIs the likeliest token; to mlx-lm no filter at all
        sampling = replace(sampling, top_p=_LEAST_TOP_P)
    return sampling, frozenset(values)
