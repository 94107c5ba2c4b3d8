"""Every error a user can meet; `node/api/http/errors.py` has the status of each.

Raised where the fault is detected, caught at the HTTP, gRPC and CLI edges only.
"""

from typing import Final

PROMPT: Final = "prompt"
"""The `param` of errors about a whole prompt; the entry node replaces it by the client's field."""
NO_HEAD: Final = (
    "the cluster has no head that answers; `exo-node status` shows which nodes do. Try again in a "
    "few seconds"
)


_BY_CODE: dict[str, "type[ExoNodeError]"] = {}


class ExoNodeError(Exception):
    """An error with a sentence for a person: what is wrong, in which field, and the remedy."""

    code = "internal_error"

    def __init_subclass__(cls, code: str = "") -> None:
        """`code`: its name on the wire and in the API; the base's if it has none."""
        if code:
            cls.code = code
            _BY_CODE[code] = cls

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """`param` names the field, flag, variable, file or tensor at fault."""
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ExoNodeError, code="invalid_value"):
    """A request that no retry will make right."""


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    """A field that this node does not implement."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """A prompt that leaves no room for an answer."""


class PreviousResponseNotFound(InvalidRequest, code="previous_response_not_found"):
    """The response to continue is not here."""


class ModelNotFound(ExoNodeError, code="model_not_found"):
    """No card, folder or cached model has that id."""


class PlacementNotFound(ExoNodeError, code="placement_not_found"):
    """No placement has that id."""


class QueueFull(ExoNodeError, code="queue_full"):
    """Too many requests are waiting."""


class InsufficientMemory(ExoNodeError, code="insufficient_memory"):
    """No allowed set of nodes can hold the model."""


class PeerLost(ExoNodeError, code="peer_lost"):
    """A node or runner ended while it was needed."""


class PeerRefused(PeerLost, code="peer_refused"):
    """No process listens at its address."""


class StateLost(PeerLost, code="state_lost"):
    """No node is gone, but what rebuilds a stage is."""


class DeviceLost(PeerLost, code="device_lost"):
    """A GPU fault ended a runner: another attempt runs on a fresh one."""


class HeadGone(PeerLost, code="head_gone"):
    """The node that was asked is the head no longer."""


class LoadFailed(ExoNodeError, code="load_failed"):
    """A runner could not load its stage."""


class NumericError(ExoNodeError, code="numeric_error"):
    """The model gave NaN or infinity."""


class InvalidCard(ExoNodeError, code="invalid_card"):
    """A model card breaks the schema."""


class InvalidCheckpoint(ExoNodeError, code="invalid_checkpoint"):
    """A malformed config.json or safetensors file."""


class DownloadFailed(ExoNodeError, code="download_failed"):
    """The hub could not be reached or refused."""


class InvalidFrame(ExoNodeError, code="invalid_frame"):
    """A tensor frame is not what the stage expects."""


class Untrusted(ExoNodeError, code="untrusted_peer"):
    """A peer showed no certificate of this cluster."""


class OtherCluster(Untrusted, code="other_cluster"):
    """A peer's certificate is of another cluster's key."""


class DuplicateIdentity(Untrusted, code="duplicate_identity"):
    """Another process with the same node id runs."""


class JoinRefused(ExoNodeError, code="join_refused"):
    """A node did not let another one in."""


class RemovalRefused(ExoNodeError, code="removal_refused"):
    """A model's files may not be deleted now."""


class PlacementSuperseded(ExoNodeError, code="placement_superseded"):
    """A later request placed the model otherwise."""


class DigitsDiffer(ExoNodeError, code="digits_differ"):
    """The digits of two nodes did not match."""


class JoinRequestNotFound(ExoNodeError, code="join_request_not_found"):
    """No node asks to join under that id."""


class InvalidSettings(ExoNodeError, code="invalid_settings"):
    """A flag, variable or file of this node is wrong."""


def from_code(code: str, message: str, param: str | None) -> ExoNodeError:
    """The error that another process raised, rebuilt from its wire form."""
    return _BY_CODE.get(code, ExoNodeError)(message, param=param)
