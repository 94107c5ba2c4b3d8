"""What an answer may go on from: the state behind a prefix of its prompt that was read before."""

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...mtp.batch_prompts import PromptBatch
from ...mtp.drafters import DrafterState, NativeDrafter
from ...mtp.parts import Parts
from ...mtp.rollback import cache_arrays
from ...mtp.schedule import prefill_ends
from ...mtp.seams import Wait
from ..model.stage_model import StageModel
from ..pipeline.meeting import Meeting
from ..pipeline.pacing import Pacing
from ..pipeline.request_state import RequestState
from ..pipeline.verifier import Link, PipelineVerifier
from .attempts import Attempt, WholeAttempt
from .local import LocalVerifier, Target
from .options import EngineOptions
from .prefix_cache import Prefix, PrefixCache
from .prefix_disk import PrefixDisk
from .request import EngineRequest
from .spans import growth_of
from .stage_prefixes import Borders, StagePrefixes


class Beginning(NamedTuple):
    """Where an attempt begins."""

    verifier: PipelineVerifier | LocalVerifier
    drafter: DrafterState | None = None
    cached: int = 0
    """Rows of the prompt that the prefix cache had."""


class Earlier:
    """The states that outlive an answer. All methods run on the compute thread."""

    def __init__(
        self,
        stage: StageModel,
        target: Target,
        options: EngineOptions,
        turn_ends: frozenset[int],
        *,
        link: Link | None,
        meeting: Meeting | None,
        disk: PrefixDisk | None,
        parts: Parts,
    ) -> None:
        self._stage = stage
        self._target = target
        self._options = options
        self._turn_ends = turn_ends
        self._link = link
        self._meeting = meeting
        self._pacing = None if link is None else Pacing(options.stages)
        self._disk = disk
        self._parts = parts
        self.prefixes = PrefixCache(
            options.prefix_cache_bytes, lambda: stage.own_caches(stage.make_caches())
        )
        in_stages = link is not None and self.prefixes.enabled
        self._staged = StagePrefixes(stage, self.prefixes) if in_stages else None

    def common(self, request: EngineRequest) -> Generator[Wait, None, int]:
        """Rows of its prompt that every stage of a pipeline has, and the request may begin behind.

        Raises PeerLost.
        """
        if self._link is None or self._staged is None or request.alone:
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
        self,
        request: EngineRequest,
        live_bytes: Callable[[], int],
        prompts: PromptBatch | None,
        common: int,
    ) -> Beginning:
        """Behind the longest prefix of its prompt that is kept and has room.

        `prompts`: see `LocalVerifier`. `common`: of a pipeline, see there.
        """
        if self._link is not None:
            found = self._in_stages(request, live_bytes, common) if common else None
            cached = 0 if found is None else found.position
            return Beginning(self._verifier(request, self._link, found, cached), None, cached)
        if (found := self.prefix_of(request, live_bytes)) is not None:
            verifier = self._local(found.caches, found.position, prompts)
            return Beginning(verifier, found.drafter, found.position)
        return Beginning(self._local(self._stage.make_caches(), 0, prompts))

    def _local(
        self, caches: Sequence[object], position: int, prompts: PromptBatch | None
    ) -> LocalVerifier:
        return LocalVerifier(self._target, caches, position, prompts, self._parts)

    def release(self, request: str, attempt: int) -> None:
        """The answer is over."""
        if self._link is not None:
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

    def prefix_of(
        self, request: EngineRequest, live_bytes: Callable[[], int]
    ) -> RequestState | None:
        """A copy of what earlier requests left of this prompt's beginning."""
        if not self.prefixes.enabled:
            return None
        self.prefixes.shrink(live_bytes())
        prompt, ends, drafts = request.prompt, self._ends(request), request.k > 0
        salt, live = request.cache_salt, live_bytes()
        found = self._stored(request, ends, live)
        if found is None:
            found = self.prefixes.find(prompt, ends, drafts=drafts, live=live, salt=salt)
        if found is None:
            return None
        return RequestState(found.caches, position=found.position, drafter=found.drafter)

    def _stored(self, request: EngineRequest, ends: Sequence[int], live: int) -> Prefix | None:
        """What the disk has of its prompt, where that is more than memory has, which keeps a copy
        from now on."""
        if self._disk is None:
            return None
        prompt, salt, drafts = request.prompt, request.cache_salt, request.k > 0
        beyond = self.prefixes.known(prompt, ends, salt, drafts=drafts)
        stored = self._disk.find(prompt, ends, beyond, salt, drafts=drafts)
        if stored is not None:
            rows, caches, drafter = stored.position, stored.caches, stored.drafter
            drafted = [] if drafter is None else [drafter.cache]
            live += sum(array.nbytes for array in cache_arrays([*caches, *drafted]))
            kept = prompt, ends, rows, caches, drafter, self._turn_ends
            self.prefixes.keep(*kept, live, salt)
            self.prefixes.shrink(live)
        return stored

    def keep_prefix(
        self, request: EngineRequest, attempt: Attempt, rows: int, live_bytes: Callable[[], int]
    ) -> None:
        """The first `rows` rows of its prompt were read: a copy is kept where it has room beside
        all that is to be read."""
        rest = len(request.prompt) - rows
        if not self.prefixes.enabled or not attempt.cached < rows or not rest:
            return
        if self._staged is not None:
            state = attempt.verifier.state
            if state.read.border == state.position == rows:
                self._staged.keep(state, live_bytes(), rest)
            self.prefixes.shrink(live_bytes())
            return
        drafter, ends = attempt.generation.settle(), self._ends(request)
        state = drafter.state if isinstance(drafter, NativeDrafter) else None
        caches = attempt.verifier.state.caches
        kept = request.prompt, ends, rows, caches, state, self._turn_ends
        live = live_bytes() + growth_of([*caches, *([state.cache] if state else [])], rest)
        self.prefixes.keep(*kept, live, request.cache_salt)
        if self._disk is not None:
            self._disk.keep(*kept, request.cache_salt)
        self.prefixes.shrink(live)

    def goes_on(self, attempt: Attempt, rows: int, live_bytes: Callable[[], int]) -> None:
        """An answer is to have `rows` rows more."""
        if not self.prefixes.bytes:
            return
        caches: Sequence[object] = ()
        if isinstance(attempt, WholeAttempt):
            caches = attempt.own_caches
        elif attempt.verifier.state.group is None:
            caches = self._stage.own_caches(attempt.verifier.state.caches)
        self.prefixes.shrink(live_bytes() + growth_of(caches, rows))

    def _verifier(
        self,
        request: EngineRequest,
        link: Link,
        state: RequestState | None = None,
        cached: int = 0,
    ) -> PipelineVerifier:
        name, attempt, dtype = request.request, request.attempt, self._options.dtype
        meeting = None if request.alone else self._meeting
        border = None
        if self._staged is not None:
            border = Borders(request.prompt, self._ends(request), self._turn_ends, cached).at
        verifier = PipelineVerifier(
            self._stage,
            link,
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
