"""Prefixes of prompts in a pipeline: what an answer on the generator may go on from."""

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

from ...mtp.schedule import prefill_ends
from ...mtp.seams import Wait
from ..model.stage_model import StageModel
from ..pipeline.meeting import Meeting
from ..pipeline.pacing import Pacing
from ..pipeline.request_state import RequestState
from ..pipeline.verifier import Link, PipelineVerifier
from .options import EngineOptions
from .prefix_cache import PrefixCache
from .prefix_store import MORE
from .request import EngineRequest
from .spans import growth_of
from .stage_prefixes import Borders, StagePrefixes


class Earlier:
    """The generator's part of the states that outlive an answer. Runs on the compute thread."""

    def __init__(
        self,
        stage: StageModel,
        options: EngineOptions,
        turn_ends: frozenset[int],
        link: Link,
        meeting: Meeting | None,
        prefixes: PrefixCache,
    ) -> None:
        self._stage = stage
        self._options = options
        self._turn_ends = turn_ends
        self._link = link
        self._meeting = meeting
        self._pacing = Pacing(options.stages)
        self.prefixes = prefixes
        self._staged = StagePrefixes(stage, self.prefixes) if self.prefixes.enabled else None

    def common(self, request: EngineRequest) -> Generator[Wait, None, int]:
        """Rows of its prompt that every stage of a pipeline has, and the request may begin behind.

        Raises PeerLost.
        """
        if self._staged is None or request.alone:
            return 0
        prompt, ends = request.prompt, self._ends(request)[:-1]  # the last one's logits are wanted
        held = self._staged.held(prompt, ends, request.cache_salt)
        if not held:
            return 0
        schedule = [end - begin for begin, end in pairwise((0, *ends)) if end <= held[-1]]
        ids, name = prompt[: held[-1]], request.request
        asked = self._link.held_by_all(name, request.attempt, ids, schedule, held)
        yield Wait(asked)
        return max(asked.result(), default=0)

    def begin(
        self, request: EngineRequest, live_bytes: Callable[[], int], common: int
    ) -> PipelineVerifier:
        """Behind the first `common` rows of its prompt; none of them where they have no room."""
        found = self._in_stages(request, live_bytes, common) if common else None
        return self._verifier(request, found, 0 if found is None else found.position)

    def release(self, request: str, attempt: int) -> None:
        """The answer is over."""
        self._link.release(request, attempt)

    @property
    def bytes(self) -> int:
        """Of forwards that requests share; prefixes go where requests need the room."""
        merged = self._meeting.arrays() if self._meeting else []
        return sum(array.nbytes for array in merged)

    def _in_stages(
        self, request: EngineRequest, live_bytes: Callable[[], int], common: int
    ) -> RequestState | None:
        """This stage's state behind the first `common` rows of the prompt."""
        assert self._staged is not None
        self.prefixes.shrink(live_bytes())
        ends = [end for end in self._ends(request) if end <= common]
        prompt, salt = request.prompt[:common], request.cache_salt
        return self._staged.behind(prompt, ends, live_bytes(), salt)

    def keep_prefix(
        self,
        request: EngineRequest,
        verifier: PipelineVerifier,
        rows: int,
        live_bytes: Callable[[], int],
    ) -> None:
        """The first `rows` rows of its prompt were read: a copy is kept where it has room beside
        all that is to be read."""
        rest = len(request.prompt) - rows
        if self._staged is None or not rest:
            return
        state = verifier.state
        if state.read.border == state.position == rows:
            self._staged.keep(state, live_bytes(), rest)
        self.prefixes.shrink(live_bytes())

    def goes_on(self, verifier: PipelineVerifier, live_bytes: Callable[[], int]) -> None:
        """An answer is to have more rows."""
        if not self.prefixes.bytes:
            return
        caches: Sequence[object] = ()
        if verifier.state.group is None:
            caches = self._stage.own_caches(verifier.state.caches)
        self.prefixes.shrink(live_bytes() + growth_of(caches, MORE))

    def _verifier(
        self, request: EngineRequest, state: RequestState | None, cached: int
    ) -> PipelineVerifier:
        name, attempt, dtype = request.request, request.attempt, self._options.dtype
        meeting = None if request.alone else self._meeting
        border = None
        if self._staged is not None:
            border = Borders(request.prompt, self._ends(request), self._turn_ends, cached).at
        verifier = PipelineVerifier(
            self._stage,
            self._link,
            name,
            attempt,
            dtype,
            state,
            meeting,
            self._pacing,
            background=request.background,
            border=border,
        )
        verifier.state.read.salt = request.cache_salt
        return verifier

    def _ends(self, request: EngineRequest) -> list[int]:
        return prefill_ends(request.prompt, self._options.prefill_chunk, self._turn_ends)
