"""Hardware: what the planner is told of a machine, from the texts that systems print."""

import subprocess
import sys
from collections.abc import Mapping

import psutil
import pytest

from exo_node.node.machine import hardware
from exo_node.node.machine.hardware import (
    Backend,
    Gpu,
    Hardware,
    detect_hardware,
    estimate_bandwidth,
    guess_backend,
    metal_limit,
    parse_cpuinfo,
    parse_nvidia_smi,
    usable_memory,
)
from exo_node.placement.cluster import OWN

_GIB = 2**30
_MIB = 2**20


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("processor\t: 0\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n", "AMD EPYC"),
        ("processor : 0\nBogoMIPS : 108.0\n\nModel : Raspberry Pi 5\n", "Raspberry Pi 5"),
        ("processor : 0\nCPU implementer : 0x41\n", None),
        ("model name\t:\nHardware\t: Qualcomm\n", "Qualcomm"),
        ("", None),
    ],
)  # fmt: skip
def test_cpuinfo_names_the_chip(text: str, chip: str | None) -> None:
    assert parse_cpuinfo(text) == chip


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("NVIDIA H200, 143771, 143152\n", (Gpu("NVIDIA H200", 143771 * _MIB, 143152 * _MIB),)),
        ("NVIDIA GB10, [N/A], [N/A]\n", (Gpu("NVIDIA GB10", None, None),)),
        ("A, 1, 1\nB, 2, 0\n", (Gpu("A", _MIB, _MIB), Gpu("B", 2 * _MIB, 0))),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n", ()),
        ("", ()),
    ],
)
def test_nvidia_smi_lists_gpus(text: str, gpus: tuple[Gpu, ...]) -> None:
    assert parse_nvidia_smi(text) == gpus


@pytest.mark.parametrize(
    ("system", "machine", "distributions", "backend"),
    [
        ("darwin", "arm64", {"mlx-metal"}, "metal"),
        ("darwin", "x86_64", set[str](), "cpu"),
        ("linux", "x86_64", {"mlx", "mlx-cuda-13"}, "cuda"),
        ("linux", "aarch64", {"mlx", "mlx-cpu"}, "cpu"),
    ],
)
def test_the_backend_follows_the_system_and_what_is_installed(
    system: str, machine: str, distributions: set[str], backend: Backend
) -> None:
    assert guess_backend(system, machine, distributions) == backend


@pytest.mark.parametrize(
    ("backend", "limit", "usable"),
    [
        ("metal", None, 10 * _GIB),
        ("cpu", None, 8 * _GIB),
        ("cuda", None, 8 * _GIB),
        ("metal", 60 * _GIB, 60 * _GIB),
        ("cpu", 20 * _GIB, 20 * _GIB),
        ("cpu", 500 * _GIB, 64 * _GIB),
    ],
)
def test_usable_memory_is_the_limit_or_a_share(
    caplog: pytest.LogCaptureFixture, backend: Backend, limit: int | None, usable: int
) -> None:
    assert usable_memory(backend, 64 * _GIB, 10 * _GIB, limit) == usable
    assert [record.getMessage() for record in caplog.records] == (
        ["--memory-limit: there are 68.7 GB, and models get no more"] if limit == 500 * _GIB else []
    )


@pytest.mark.parametrize(
    ("said", "limit"),
    [("51539607552\n", 48 * _GIB), ("99999999999999", 64 * _GIB)]
    + [
        (silence, int(0.70 * 64 * _GIB))
        for silence in (None, "", "KeyError", "-1", "9e9", "0", "9" * 5000)
    ],
)
def test_metals_limit_is_what_mlx_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str | None, limit: int
) -> None:
    commands = list[tuple[str, ...]]()

    def output_of(*command: str) -> str | None:
        commands.append(command)
        return said

    monkeypatch.setattr(hardware, "output_of", output_of)
    assert metal_limit(64 * _GIB) == limit
    assert "max_recommended_working_set_size" in commands[0][-1]
    is_known = limit != int(0.70 * 64 * _GIB)
    assert [record.getMessage() for record in caplog.records] == (
        [] if is_known else ["Metal does not say its memory limit: models get 70 %"]
    )


def test_a_mac_plans_with_metals_limit_whatever_is_free_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    said = {"sysctl": "Apple M4 Max", sys.executable: "1000000"}
    monkeypatch.setattr(hardware, "output_of", lambda *command: said[command[0]])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    mac = detect_hardware(set())
    assert (mac.backend, mac.chip, mac.usable_bytes) == ("metal", "Apple M4 Max", 1000000)


@pytest.mark.skipif(sys.platform != "darwin", reason="needs Metal")
def test_this_mac_says_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    total = psutil.virtual_memory().total
    assert total / 2 < metal_limit(total) < total and not caplog.records


@pytest.mark.parametrize(
    ("chip", "backend", "cores", "gigabytes"),
    [
        ("Apple M1", "metal", 8, 68),
        ("Apple M1 (Virtual)", "metal", 8, 68),
        ("Apple M2 Ultra", "metal", 24, 800),
        ("Apple M3 Max", "metal", 14, 300),
        ("Apple M3 Max", "metal", 16, 400),
        ("Apple M4 Max", "metal", None, 410),
        ("Apple M4 Max", "metal", 16, 546),
        ("Apple M5 Pro", "metal", 18, 307),
        ("Apple M9 Max", "metal", 40, 460),
        ("Apple M10", "metal", 40, 150),
        ("Apple A18 Pro", "metal", 6, 60),
        ("NVIDIA H200", "cuda", 16, 4800),
        ("NVIDIA GH200 480GB", "cuda", 72, 4000),
        ("NVIDIA H100 PCIe", "cuda", 16, 2000),
        ("NVIDIA GeForce RTX 4090", "cuda", 16, 1008),
        ("NVIDIA Tomorrow", "cuda", 16, 300),
        ("AMD EPYC", "cpu", 2, 40),
    ],
)
def test_bandwidth_is_the_published_one(
    chip: str, backend: Backend, cores: int | None, gigabytes: int
) -> None:
    assert estimate_bandwidth(chip, backend, cores) == gigabytes * 10**9


def test_this_machine_is_described() -> None:
    hardware = detect_hardware(set(), memory_limit=10**9)
    assert hardware.chip
    assert hardware.total_bytes == psutil.virtual_memory().total
    assert hardware.usable_bytes == 10**9
    assert hardware.bandwidth > 0


def stand_in(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[str | None, bytes | Exception]
) -> None:
    """An nvidia-smi, by the GPU that it is asked for."""

    def run(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[bytes]:
        requested = next((each[5:] for each in command if each.startswith("--id=")), None)
        answer = answers.get(requested, subprocess.CalledProcessError(6, command))
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer, b"")

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")
@pytest.mark.parametrize(
    ("answer", "backend", "chip", "total"),
    [
        (b"NVIDIA H200, 1000, 900\n", "cuda", "NVIDIA H200", 1000 * _MIB),
        (b"NVIDIA GB10, [N/A], [N/A]\n", "cuda", "NVIDIA GB10", None),
        (subprocess.TimeoutExpired("nvidia-smi", 5), "cpu", None, None),
        (subprocess.CalledProcessError(9, "nvidia-smi"), "cpu", None, None),
        (PermissionError(13, "not executable"), "cpu", None, None),
    ],
)
def test_a_cuda_node_is_its_first_gpu_and_without_one_a_cpu_node(
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes | Exception,
    backend: Backend,
    chip: str | None,
    total: int | None,
) -> None:
    stand_in(monkeypatch, {None: answer})
    hardware = detect_hardware({"mlx-cuda-13"})
    assert hardware.backend == backend
    assert chip is None or hardware.chip == chip
    assert hardware.total_bytes == (total or psutil.virtual_memory().total)


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux")
@pytest.mark.parametrize(
    ("visible", "chip", "others"),
    [
        (None, "first", 1),
        ("1", "second", 0),
        (" 1 , 0", "second", 1),
        ("1,-1,0", "second", 0),
        ("GPU-2", "second", 0),
        ("MIG-7", "first", 0),
        ("", None, 0),
        ("-1", None, 0),
    ],
)
def test_the_gpu_that_is_described_is_the_first_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, chip: str | None, others: int
) -> None:
    """Two nodes with a GPU each on one host both described the first one."""
    second = b"second, 20, 19\n"
    answers = {None: b"first, 10, 9\n" + second, "1": second, "GPU-2": second}

    stand_in(monkeypatch, answers)
    hardware = detect_hardware({"mlx-cuda-13"}, visible_gpus=visible)
    assert hardware.backend == ("cpu" if chip is None else "cuda")
    assert hardware.other_gpus == others
    assert chip is None or (hardware.chip, hardware.total_bytes) == (
        chip,
        {"first": 10, "second": 20}[chip] * _MIB,
    )


def test_products_of_float32_are_none_where_kernels_are_mlxs() -> None:
    def hardware(products: str) -> Hardware:
        return Hardware("Xeon", "cpu", 1, 1, 1.0, products)

    assert hardware(OWN).products_with("auto") == OWN
    assert hardware(OWN).products_with("mlx") == "EXO_KERNELS is mlx"
    assert hardware("no compiler").products_with("auto") == "no compiler"
    assert hardware("").products_with("mlx") == "", "a GPU's"
