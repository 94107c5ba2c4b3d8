"""The number of choices that a request wants."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ..http.bodies import StrictBody
from .choices import MAX_CHOICES


class ChoicesFields(StrictBody):
    """`n` of OpenAI's dialect. `best_of` may ask for no more answers than it returns."""

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _returns_every_answer(self) -> Self:
        if self.best_of not in (None, 1, self.count):
            raise PydanticCustomError(
                "unsupported_parameter",
                "is not supported by this node; leave it out or send the value of 'n'",
                {"at": "best_of"},
            )
        return self

    @property
    def count(self) -> int:
        """The number of choices."""
        return self.n or 1
