"""Fields of messages by their names, so that what has a new one need not be copied by hand."""

from typing import Any, TypeVar

from google.protobuf.message import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)


def set_fields(message: Message) -> dict[str, Any]:
    """The fields that a message has, by name: set ones, and those whose value is no default."""
    return {field.name: value for field, value in message.ListFields()}


def named_fields(kind: type[Message], source: object) -> dict[str, Any]:
    """The fields of a kind of message that an object has by the same names, but for None."""
    values = ((field.name, getattr(source, field.name, None)) for field in kind.DESCRIPTOR.fields)
    return {name: value for name, value in values if value is not None}


def filled(kind: type[AnyMessage], source: object, **own: Any) -> AnyMessage:
    """A message with the fields that an object has by the same names, and `own` in place of them;
    None leaves a field out."""
    return kind(**(named_fields(kind, source) | own))


def changed(message: AnyMessage, **changes: Any) -> AnyMessage:
    """A copy of a message with other values in some fields; None takes a value away."""
    return type(message)(**(set_fields(message) | changes))


def completed(message: AnyMessage, defaults: AnyMessage) -> AnyMessage:
    """A copy of a message with the fields that only `defaults` has; lists are not joined."""
    return type(message)(**(set_fields(defaults) | set_fields(message)))
