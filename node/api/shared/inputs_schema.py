"""Texts and token ids in place of messages: one, or a list of either."""

from typing import Annotated, Final, cast

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from ..http.bodies import as_whole

MOST_ID: Final = 2**31 - 1
"""The wire's ids are signed: those below 0 are rows of images."""


TokenId = Annotated[int, BeforeValidator(as_whole), Field(ge=0, le=MOST_ID)]
_TOKEN_IDS: Final = TypeAdapter[list[int]](
    Annotated[list[TokenId], FailFast()], config=ConfigDict(strict=True)
)
AnyInput = str | list[str] | list[TokenId] | list[list[TokenId]]
"""The forms that clients may send."""


def wrong(at: str, sentence: str) -> PydanticCustomError:
    """The error of a validator about the field `at`; `sentence` follows its name."""
    return PydanticCustomError("value", "{sentence}", {"sentence": sentence, "at": at})


def inputs_of(value: object, most: int) -> list[str | list[int]]:
    """A text, token ids, or a list of at most `most` of either, as a list. Raises naming the one at
    fault."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("", "should be a text, a list of token ids, or a list of these")
    items = cast("list[object]", value)
    if not items or not isinstance(items[0], str | list):
        return [_token_ids(items, "")]
    if len(items) > most:
        raise wrong("", f"should have at most {most} entries; send the others by themselves")
    return [
        item if isinstance(item, str) else _token_ids(item, f"[{number}]")
        for number, item in enumerate(items)
    ]


def _token_ids(ids: object, at: str) -> list[int]:
    if ids == []:
        raise wrong(at, "should have at least 1 token id")
    try:
        return _TOKEN_IDS.validate_python(ids)
    except ValidationError as fault:
        place = fault.errors()[0]["loc"]
        if not place:
            raise wrong(at, "should be a text or a list of token ids") from None
        sentence = f"should be a token id of 0 to {MOST_ID}"
        raise wrong(f"{at}[{place[0]}]", sentence) from None
