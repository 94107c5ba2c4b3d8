"""The facts of this machine that the planner needs: chip, MLX backend, memory and its bandwidth.

They are found without importing mlx.
Bandwidths are published peaks, good for a first plan only; measured stage times replace them.
"""

import logging
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from ...shard.kernels.cpu_code import own_products

log = logging.getLogger(__name__)

Backend = Literal["metal", "cuda", "cpu"]

_GB: Final = 10**9
_MIB: Final = 1024**2
# Without a persistence daemon nvidia-smi wakes the GPU first, which takes seconds.
_COMMAND_TIMEOUT_S: Final = 5.0
_NVIDIA_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)

# GB/s from Apple's technical specifications (support.apple.com/specs) and press releases. Where
# a chip was sold with two memory systems, the narrower one: see _APPLE_WIDE.
_APPLE: Final = {
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 300, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 410,
    "M5": 153, "M5 Pro": 307, "M5 Max": 460,
}  # fmt: skip
# The wider variant, by its CPU cores. The M5 Max's (614 GB/s) has the same 18 as the narrower.
_APPLE_WIDE: Final = {("M3 Max", 16): 400, ("M4 Max", 16): 546}
_APPLE_LATER: Final = {"": 150, "Pro": 300, "Max": 460, "Ultra": 800}  # a chip younger than this
_APPLE_OTHER: Final = 60  # A-series

# GB/s from NVIDIA's data sheets; the first name that the GPU's name contains counts.
_NVIDIA: Final = (
    ("GH200", 4000), ("B200", 8000), ("H200", 4800), ("H100 NVL", 3900), ("H100 PCIe", 2000),
    ("H100", 3350), ("A100", 1555), ("GB10", 273), ("PRO 6000", 1792), ("5090", 1792),
    ("L40", 864), ("6000 Ada", 960), ("4090", 1008), ("3090", 936), ("A10", 600), ("L4", 300),
    ("T4", 320),
)  # fmt: skip
_NVIDIA_OTHER: Final = 300
_CPU: Final = 40  # two channels of DDR4-3200 give 51 at best

# Metal's own limit for one process; `sysctl iogpu.wired_limit_mb` moves it. Of 16 GB it is 74 %,
# of 128 GB 84 %. The node itself keeps MLX out of its process.
_METAL_LIMIT: Final = (
    "import mlx.core as m; print(m.device_info()['max_recommended_working_set_size'])"
)
_MAC_SHARE: Final = 0.70  # of the total, where Metal does not say it
_SHARE: Final = 0.80  # of what is free: other programs own the rest


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it; memory in bytes, None where the GPU shares the system's."""

    name: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine; memory in bytes and bandwidth in bytes per second, both of what MLX computes on.

    `usable_bytes` is what stages may take: the limit that a person set, at most the total, else
    a default share.
    """

    chip: str
    backend: Backend
    total_bytes: int
    usable_bytes: int
    bandwidth: float
    float32_products: str = ""
    """See `placement.cluster.NodeFacts`; without the effect of EXO_KERNELS."""
    other_gpus: int = 0
    """The number of GPUs that CUDA shows this node besides the one that it computes on."""

    def products_with(self, kernels: str) -> str:
        """`float32_products` under EXO_KERNELS = `kernels`."""
        off = kernels == "mlx" and self.float32_products
        return "EXO_KERNELS is mlx" if off else self.float32_products


def detect_hardware(
    distributions: Collection[str], memory_limit: int | None = None, visible_gpus: str | None = None
) -> Hardware:
    """This machine. `distributions` are the installed ones; blocks for up to some seconds, and for
    one more the first time on a CPU, for which it compiles.

    `visible_gpus` is CUDA_VISIBLE_DEVICES, which nvidia-smi itself does not heed, or None.
    """
    backend = guess_backend(sys.platform, platform.machine(), distributions)
    gpu, others = _visible_gpus(visible_gpus) if backend == "cuda" else (None, 0)
    if backend == "cuda" and gpu is None:
        backend, others = "cpu", 0
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    if gpu is not None and gpu.total_bytes is not None and gpu.free_bytes is not None:
        total, available = gpu.total_bytes, gpu.free_bytes
    if backend == "metal":
        available = metal_limit(total)
    chip = gpu.name if gpu is not None else cpu_name()
    return Hardware(
        chip=chip,
        backend=backend,
        total_bytes=total,
        usable_bytes=usable_memory(backend, total, available, memory_limit),
        bandwidth=estimate_bandwidth(chip, backend, psutil.cpu_count(logical=False)),
        float32_products=own_products() if backend == "cpu" else "",
        other_gpus=others,
    )


def guess_backend(system: str, machine: str, distributions: Collection[str]) -> Backend:
    """The backend that MLX would use, provided that a CUDA distribution finds its GPU."""
    if system == "darwin" and machine == "arm64":
        return "metal"
    if system == "linux" and any(name.startswith("mlx-cuda") for name in distributions):
        return "cuda"
    return "cpu"


def usable_memory(backend: Backend, total: int, available: int, limit: int | None) -> int:
    """Bytes that stages may take of `total`. `available`: free now, or on a Mac Metal's limit."""
    if limit is not None:
        if limit > total:
            log.warning("--memory-limit: there are %.1f GB, and models get no more", total / 1e9)
        return min(limit, total)
    return available if backend == "metal" else int(available * _SHARE)


def metal_limit(total: int) -> int:
    """Bytes of `total` that Metal lets one process use, as MLX reports them in a process of its
    own; a share with a warning if it does not."""
    text = (output_of(sys.executable, "-c", _METAL_LIMIT) or "").strip()
    if re.fullmatch("[1-9][0-9]{0,17}", text):
        return min(int(text), total)
    log.warning("Metal does not say its memory limit: models get %.0f %%", 100 * _MAC_SHARE)
    return int(total * _MAC_SHARE)


def estimate_bandwidth(chip: str, backend: Backend, cores: int | None) -> float:
    """Bytes per second that `chip` reads from the memory of `backend`; `cores` of its CPU."""
    match backend:
        case "metal":
            return float(_apple_bandwidth(chip, cores) * _GB)
        case "cuda":
            speeds = (speed for name, speed in _NVIDIA if name in chip)
            return float(next(speeds, _NVIDIA_OTHER) * _GB)
        case "cpu":
            return float(_CPU * _GB)


def parse_cpuinfo(text: str) -> str | None:
    """The chip's name in Linux's /proc/cpuinfo; ARM kernels name the board, or nothing."""
    for key in ("model name", "Model", "Hardware", "cpu model"):
        match = re.search(rf"^{key}[ \t]*:[ \t]*(\S.*)$", text, re.MULTILINE)
        if match:
            return match[1].strip()
    return None


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """The lines `name, total MiB, free MiB` of nvidia-smi; `[N/A]` where memory is shared."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        name, *sizes = [cell.strip() for cell in line.rsplit(",", 2)]
        if name and len(sizes) == 2:
            gpus.append(Gpu(name, *(int(s) * _MIB if s.isdecimal() else None for s in sizes)))
    return tuple(gpus)


def _apple_bandwidth(chip: str, cores: int | None) -> int:
    match = re.search(r"\bM[0-9]+(?: (Pro|Max|Ultra))?\b", chip)
    if match is None:
        return _APPLE_OTHER
    if cores is not None and (wide := _APPLE_WIDE.get((match[0], cores))):
        return wide
    return _APPLE.get(match[0], _APPLE_LATER[match[1] or ""])


def _visible_gpus(visible: str | None) -> tuple[Gpu | None, int]:
    """The GPU that MLX computes on, the first that CUDA shows it, and how many others it shows."""
    if visible is None:
        gpus = _nvidia_smi()
        return (gpus[0] if gpus else None), max(0, len(gpus) - 1)
    names = [name.strip() for name in visible.split(",")]
    count = next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    if not count:  # CUDA shows none from such a name on
        return None, 0
    # CUDA also takes what nvidia-smi does not: the beginning of a UUID, a part of a GPU.
    gpus = _nvidia_smi(f"--id={names[0]}") or _nvidia_smi()
    return (gpus[0] if gpus else None), count - 1


def _nvidia_smi(*options: str) -> tuple[Gpu, ...]:
    return parse_nvidia_smi(output_of(*_NVIDIA_QUERY, *options) or "")


def cpu_name() -> str:
    if sys.platform == "darwin":
        name = output_of("sysctl", "-n", "machdep.cpu.brand_string")
    else:
        source = Path("/proc/cpuinfo")
        name = parse_cpuinfo(source.read_text(errors="replace")) if source.exists() else None
    return (name or "").strip() or platform.machine()


def output_of(*command: str) -> str | None:
    """The output of a system tool, or None where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    limit = _COMMAND_TIMEOUT_S
    try:
        process = subprocess.run(command, capture_output=True, timeout=limit, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return process.stdout.decode(errors="replace")
