"""Prompts in text or ids, encoded or decoded without a chat template."""

from ...placement.errors import PROMPT, InvalidRequest
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..text.prompt_encoder import PromptEncoder


async def encode_bare(
    request: pb.EncodeRequest, prompts: PromptEncoder, limits: StageLimits
) -> pb.EncodeReply:
    """The ids of a text, or the text of ids. Raises InvalidRequest."""
    match request.WhichOneof("what"):
        case "text":
            ids = await prompts.encode_text(request.text, limits.context_length)
            return pb.EncodeReply(ids=ids, context_length=limits.context_length)
        case "token_ids":
            if not all(0 <= token < limits.vocabulary for token in request.token_ids.ids):
                raise InvalidRequest(f"tokens are 0 to {limits.vocabulary - 1}", param=PROMPT)
            return pb.EncodeReply(text=await prompts.decode(request.token_ids.ids))
        case "messages":
            raise InvalidRequest("an embedder has no chats; send a text", param=PROMPT)
        case None:
            raise InvalidRequest("there is nothing to encode", param=PROMPT)
