"""Every error a user can meet.

    ExoNodeError
    ├── InvalidRequest            a request that no retry will make right          400
    │   ├── UnsupportedParameter  a field that this node does not implement        400
    │   ├── ContextLengthExceeded a prompt that leaves no room for an answer       400
    │   └── PreviousResponseNotFound  the stored response to continue is not here  400
    ├── ModelNotFound             no card, folder or cached model has that id      404
    ├── PlacementNotFound         no placement has that id                         404
    ├── ResponseNotFound          no stored response has that id                   404
    ├── ResponsesUnavailable      stored responses cannot be read or written now   503
    ├── QueueFull                 too many requests are waiting                    429
    ├── InsufficientMemory        no allowed set of nodes can hold the model       503
    ├── PeerLost                  a node or runner ended while it was needed       503
    │   ├── PeerRefused           nobody listens at its address                  503
    │   ├── StateLost             nobody is gone, but what rebuilds a stage is     503
    │   └── HeadGone              the node that was asked is the head no longer    503
    ├── LoadFailed                a runner could not load its stage                503
    ├── NumericError              the model gave NaN or infinity                   500
    ├── InvalidCard               a model card breaks the schema                   503
    ├── InvalidCheckpoint         config.json or a safetensors file is malformed   503
    ├── DownloadFailed            the hub could not be reached or refused
    ├── InvalidFrame              a tensor frame is not what the stage expects
    ├── JoinRequestNotFound       no node asks to join under that id              404
    ├── JoinRefused               a node did not let another one in               409
    ├── RemovalRefused            a model's files may not be deleted now          409
    ├── PlacementSuperseded       a later request placed the model otherwise      409
    ├── DigitsDiffer              the digits of two nodes did not match          400
    ├── Untrusted                 a peer showed no certificate of this cluster
    │   ├── OtherCluster          a peer's certificate is of another cluster's key
    │   └── DuplicateIdentity     another process with the same node id runs       exit 3
    └── InvalidSettings           a flag, variable or file of this node is wrong   exit 2

Raised where the fault is detected, caught at the HTTP, gRPC and CLI edges only.
"""

from typing import Final

PROMPT: Final = "prompt"
"""The `param` of errors about a whole prompt; the entry node replaces it by the client's field."""


class ExoNodeError(Exception):
    """An error with a sentence for a person: what is wrong, in which field, and the remedy."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """`param` names the field, flag, variable, file or tensor at fault."""
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ExoNodeError):
    code = "invalid_value"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ModelNotFound(ExoNodeError):
    code = "model_not_found"


class PlacementNotFound(ExoNodeError):
    code = "placement_not_found"


class ResponseNotFound(ExoNodeError):
    code = "response_not_found"


class ResponsesUnavailable(ExoNodeError):
    code = "responses_unavailable"


class QueueFull(ExoNodeError):
    code = "queue_full"


class InsufficientMemory(ExoNodeError):
    code = "insufficient_memory"


class PeerLost(ExoNodeError):
    code = "peer_lost"


class PeerRefused(PeerLost):
    code = "peer_refused"


class StateLost(PeerLost):
    code = "state_lost"


class HeadGone(PeerLost):
    code = "head_gone"


class LoadFailed(ExoNodeError):
    code = "load_failed"


class NumericError(ExoNodeError):
    code = "numeric_error"


class InvalidCard(ExoNodeError):
    code = "invalid_card"


class InvalidCheckpoint(ExoNodeError):
    code = "invalid_checkpoint"


class DownloadFailed(ExoNodeError):
    code = "download_failed"


class InvalidFrame(ExoNodeError):
    code = "invalid_frame"


class Untrusted(ExoNodeError):
    code = "untrusted_peer"


class OtherCluster(Untrusted):
    code = "other_cluster"


class DuplicateIdentity(Untrusted):
    code = "duplicate_identity"


class JoinRefused(ExoNodeError):
    code = "join_refused"


class RemovalRefused(ExoNodeError):
    code = "removal_refused"


class PlacementSuperseded(ExoNodeError):
    code = "placement_superseded"


class DigitsDiffer(ExoNodeError):
    code = "digits_differ"


class JoinRequestNotFound(ExoNodeError):
    code = "join_request_not_found"


class InvalidSettings(ExoNodeError):
    code = "invalid_settings"


def _subclasses(kind: type[ExoNodeError]) -> list[type[ExoNodeError]]:
    return [kind] + [deeper for sub in kind.__subclasses__() for deeper in _subclasses(sub)]


def from_code(code: str, message: str, param: str | None) -> ExoNodeError:
    """The error that another process raised, rebuilt from its wire form."""
    for kind in _subclasses(ExoNodeError):
        if kind.code == code:
            return kind(message, param=param)
    return ExoNodeError(message, param=param)
