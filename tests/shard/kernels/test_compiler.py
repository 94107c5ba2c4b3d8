"""Compiling kernels and storing their code, with a stand-in for NVRTC."""

import os
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from exo_node.shard.kernels import code_store, compiler

CODE = b"\x7fELF and more"


class Library:
    """NVRTC's calls; gives CODE, or refuses with `log`."""

    def __init__(self, log: str = "") -> None:
        self.log, self.compiled, self.destroyed = log, 0, 0

    def nvrtcCreateProgram(self, *_: Any) -> int:
        return 0

    def nvrtcCompileProgram(self, *_: Any) -> int:
        self.compiled += 1
        return 6 if self.log else 0

    def nvrtcDestroyProgram(self, _: Any) -> int:
        self.destroyed += 1
        return 0

    def nvrtcGetCUBINSize(self, _: Any, size: Any) -> int:
        size._obj.value = len(CODE)
        return 0

    def nvrtcGetCUBIN(self, _: Any, buffer: Any) -> int:
        buffer.raw = CODE
        return 0

    def nvrtcGetProgramLogSize(self, _: Any, size: Any) -> int:
        size._obj.value = len(self.log)
        return 0

    def nvrtcGetProgramLog(self, _: Any, buffer: Any) -> int:
        buffer.raw = self.log.encode()
        return 0


def new_compiler(
    library: Any, folder: Path | None, version: str = "NVRTC 13.0"
) -> compiler.Compiler:
    return compiler.Compiler(library, version, "sm_90", (), folder)


def test_code_is_compiled_once_a_machine(tmp_path: Path) -> None:
    library = Library()
    assert new_compiler(library, tmp_path).compiled("text") == CODE
    assert new_compiler(library, tmp_path).compiled("text") == CODE and library.compiled == 1
    assert new_compiler(library, tmp_path).compiled("other") == CODE and library.compiled == 2
    assert new_compiler(library, tmp_path, "NVRTC 13.1").compiled("text") == CODE
    assert library.compiled == library.destroyed == 3


def test_code_that_is_not_whole_is_compiled_anew(tmp_path: Path) -> None:
    library = Library()
    _ = new_compiler(library, tmp_path).compiled("text")
    [file] = tmp_path.iterdir()
    _ = file.write_bytes(file.read_bytes()[:-1])
    assert new_compiler(library, tmp_path).compiled("text") == CODE and library.compiled == 2
    assert new_compiler(library, tmp_path).compiled("text") == CODE and library.compiled == 2


def test_without_a_folder_of_our_own_nothing_is_kept() -> None:
    library = Library()
    for _ in range(2):
        assert new_compiler(library, None).compiled("text") == CODE
    assert library.compiled == 2


def test_a_folder_that_takes_no_code_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert new_compiler(Library(), tmp_path).compiled("text") == CODE
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_refused_says_why() -> None:
    library = Library('exo.cu(3): warning: x\nexo.cu(4): error: identifier "y" is undefined\nmore')
    with pytest.raises(compiler.CannotCompile, match='error: identifier "y" is undefined'):
        _ = new_compiler(library, None).compiled("text")
    assert library.destroyed == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of exo-node, which is not there yet, nor is the one above it."""
    folder = tmp_path / "a" / "b" / "exo-node"

    def here(*_: Any, **__: Any) -> Path:
        return folder

    monkeypatch.setattr(platformdirs, "user_cache_path", here)
    return folder


@pytest.mark.parametrize("part", [".", "fused", "fused/x"])
def test_a_folder_that_others_may_write_to_keeps_no_code(
    cache: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert code_store.private_folder("fused", "x") == cache / "fused" / "x"
    (cache / part).chmod(0o775)
    assert code_store.private_folder("fused", "x") is None
    assert "chmod go-w" in caplog.text


def test_every_folder_that_is_made_is_its_users_alone_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        folder = code_store.private_folder("fused", "x")
    finally:
        _ = os.umask(before)
    assert folder is not None
    for each in (folder, folder.parent, cache, cache.parent, cache.parent.parent):
        assert each.stat().st_mode & 0o777 == 0o700, each


def test_links_lead_to_no_code(cache: Path, tmp_path: Path) -> None:
    folder = code_store.private_folder("kernels")
    assert folder is not None
    code_store.store_code(folder / "good", b"code")
    (folder / "link").symlink_to(folder / "good")
    assert code_store.load_code(folder / "good") == b"code"
    assert code_store.load_code(folder / "link") is None
    (elsewhere := tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "fused").symlink_to(elsewhere)
    assert code_store.private_folder("fused", "x") is None


@pytest.mark.parametrize("fault", ["another's", "writable", "pipe"])
def test_a_file_that_may_be_anothers_is_not_loaded(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "code"
    code_store.store_code(path, b"code")
    assert code_store.load_code(path) == b"code" and code_store.is_own_file(path)
    match fault:
        case "another's":
            me = os.geteuid()
            monkeypatch.setattr(code_store.os, "geteuid", lambda: me + 1)
        case "writable":
            path.chmod(0o666)
        case _:
            path.unlink()
            os.mkfifo(path)
    assert code_store.load_code(path) is None and not code_store.is_own_file(path)
