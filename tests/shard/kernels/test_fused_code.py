"""Code that MLX compiles on a CPU: private to a process, and saved for later ones."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exo_node.shard.kernels import fused_code
from exo_node.shard.kernels.fused_code import VERSION, FusedCode

COMPILE = """
import sys
import mlx.core as mx
from exo_node.shard.kernels.fused_code import compiling_apart
with compiling_apart() as save:
    fused = mx.compile(lambda a: mx.exp(a) * a)
    print(mx.array_equal(fused(mx.zeros((8,))), mx.zeros((8,))).item(), flush=True)
    save()
    if sys.argv[1:] == ["killed"]:
        import os
        os._exit(9)
"""


def libraries(cache: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (cache / "kept" / "cpu").glob("*.so")}


def own(code: FusedCode, part: str = "cpu") -> Path:
    return code.folder / "mlx" / VERSION / part


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "fused"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def begin(cache: Path) -> Iterator[Callable[[], FusedCode]]:
    """A function that starts the folder of another process."""
    with ExitStack() as stack:

        def start() -> FusedCode:
            code = FusedCode(cache)
            _ = stack.callback(code.remove)
            return code

        yield start


def test_a_process_begins_with_what_an_earlier_one_kept(
    cache: Path, begin: Callable[[], FusedCode]
) -> None:
    first = begin()
    _ = (own(first) / "liba.so").write_bytes(b"whole")
    first.save()
    second = begin()
    assert (own(second) / "liba.so").read_bytes() == b"whole"
    # What MLX does with a library of its own: write under the final name. Nobody else sees it.
    _ = (own(second) / "libb.so").write_bytes(b"ha")
    assert not any((own(other) / "libb.so").exists() for other in (first, begin()))
    _ = (own(second) / "libb.so").write_bytes(b"half and half")
    second.save()
    assert libraries(cache) == {"liba.so": b"whole", "libb.so": b"half and half"}


def test_two_that_compile_the_same_keep_the_first_ones(
    cache: Path, begin: Callable[[], FusedCode]
) -> None:
    one, other = begin(), begin()
    for code, text in ((one, b"one"), (other, b"other")):
        _ = (own(code) / "liba.so").write_bytes(text)
        code.save()
    assert libraries(cache) == {"liba.so": b"one"}


def test_gpu_code_is_never_kept_without_the_names_of_its_kernels(
    begin: Callable[[], FusedCode],
) -> None:
    """MLX reads the .ptx first, and takes a missing .txt for a file without kernels."""
    code = begin()
    linked = list[str]()
    for name in ("k.ptx", "k.txt", "k.cu"):
        _ = (own(code, "ptx") / name).write_text(name)
    link = os.link

    def watched(source: Path, target: Path) -> None:
        linked.append(target.name)
        link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_code.os, "link", watched)
        code.save()
    assert linked == ["k.txt", "k.ptx"]


def test_folders_of_dead_processes_go_and_those_of_living_ones_stay(
    cache: Path, begin: Callable[[], FusedCode]
) -> None:
    living, dead = begin(), begin()
    dead._lock.close()  # pyright: ignore[reportPrivateUsage]  # as the end of a process does
    new = begin()
    assert {p.name for p in cache.glob("run-*")} == {living.folder.name, new.folder.name}
    new.remove()
    assert not new.folder.exists() and living.folder.exists()


def test_folders_and_links_that_no_process_made_stay(cache: Path, tmp_path: Path) -> None:
    mine, library = cache / "run-mine", tmp_path / "mine" / "cpu" / "liba.so"
    for path in (mine / "lock", library):
        path.parent.mkdir(parents=True)
        _ = path.write_text("mine")
    library.chmod(0o666)
    (cache / "kept").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="kept is a link; remove it"):
        _ = FusedCode(cache)
    assert (mine / "lock").exists() and library.exists()


def test_without_a_folder_of_ones_own_nothing_is_kept(tmp_path: Path) -> None:
    code = FusedCode(None)
    assert code.folder.stat().st_mode & 0o077 == 0
    _ = (own(code) / "liba.so").write_bytes(b"whole")
    code.save()
    code.remove()
    assert not code.folder.exists()


def test_a_library_that_others_can_write_to_is_not_loaded(tmp_path: Path) -> None:
    first = FusedCode(tmp_path)
    for name in ("libgood.so", "libbad.so"):
        _ = (own(first) / name).write_bytes(b"whole")
        (own(first) / name).chmod(0o775)  # as with a umask of 002
    first.save()
    first.remove()
    (tmp_path / "kept" / "cpu" / "libbad.so").chmod(0o777)
    (tmp_path / "kept" / "cpu" / "liblink.so").symlink_to("libgood.so")
    second = FusedCode(tmp_path)
    assert sorted(each.name for each in own(second).iterdir()) == ["libgood.so"]
    _ = (own(second) / "libbad.so").write_bytes(b"compiled again")
    second.save()
    assert (tmp_path / "kept" / "cpu" / "libbad.so").read_bytes() == b"compiled again"
    second.remove()


def test_a_full_disk_costs_what_would_be_kept_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = set[str]()

    def mkdtemp(prefix: str, dir: Path | None) -> str:
        if dir is None and "all" not in full:
            (tmp_path / "elsewhere").mkdir()
            return str(tmp_path / "elsewhere")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fused_code.tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fused_code, "users_folder", lambda: tmp_path)
    before = os.environ.get("TMPDIR")
    with fused_code.compiling_apart() as save:
        assert os.environ["TMPDIR"] == str(tmp_path / "elsewhere")
        save()
    full.add("all")
    with fused_code.compiling_apart() as save:
        assert os.environ.get("TMPDIR") == before
        save()
    assert caplog.text.count("No space left") == 3


def test_pythons_own_temporary_files_stay_where_they_were(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/before")
    code = FusedCode(cache)
    before = fused_code.tempfile.gettempdir()
    code.use()
    assert os.environ["TMPDIR"] == str(code.folder) and fused_code.tempfile.gettempdir() == before
    code.remove()
    assert os.environ["TMPDIR"] == "/before"


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles by g++ on Linux"
)
def test_mlx_compiles_once_for_processes_that_follow_and_nothing_where_others_could_write(
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "c"), "TMPDIR": str(temporary)}

    def compiled(*arguments: str) -> int:
        process = subprocess.run(
            [sys.executable, "-c", COMPILE, *arguments],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert process.stdout == "True\n", process.stderr
        return process.returncode

    assert compiled("killed") == 9
    [cache] = (tmp_path / "c" / "exo-node" / "fused").iterdir()
    files = libraries(cache)
    assert files and not list(temporary.iterdir())
    broken = tmp_path / "g++"
    _ = broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    environment["PATH"] = str(tmp_path)
    assert compiled() == 0
    assert libraries(cache) == files and not list(cache.glob("run-*"))
