"""The memory of this process while it works: MLX's, and what the GPU's driver counts."""

import shutil
import subprocess
import threading
from types import TracebackType
from typing import Final, Self

import mlx.core as mx

EVERY_S: Final = 0.02
GPU_EVERY: Final = 20
"""Looks at MLX's figures between two at the driver's, each a process."""
_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=memory.used",
    "--format=csv,noheader,nounits",
    "-i",
    "0",
)


class MemoryWatch:
    """The largest figures, in GB, between the entry of its context and the exit."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._held = self._cache = self._gpu = 0

    def __enter__(self) -> Self:
        mx.reset_peak_memory()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def figures(self) -> dict[str, float]:
        """`active`: of live arrays, exact; `held`: those and freed buffers, as sampled; `gpu`: of
        the first GPU, 0 without one."""
        sizes = {"active": mx.get_peak_memory(), "held": self._held, "cache": self._cache}
        figures = {name: round(size / 1e9, 2) for name, size in sizes.items()}
        return figures | {"gpu": round(self._gpu * (1 << 20) / 1e9, 2)}

    def _watch(self) -> None:
        looks = 0
        while not self._ended.wait(EVERY_S):
            cache = mx.get_cache_memory()
            self._cache = max(self._cache, cache)
            self._held = max(self._held, cache + mx.get_active_memory())
            if looks % GPU_EVERY == 0:
                self._gpu = max(self._gpu, gpu_mebibytes())
            looks += 1


def gpu_mebibytes() -> int:
    """MiB that all processes have of the first GPU; 0 without one."""
    if shutil.which(_QUERY[0]) is None:
        return 0
    answer = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=60)
    return int(answer.stdout.split()[0])
