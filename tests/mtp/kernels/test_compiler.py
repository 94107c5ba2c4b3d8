"""Compiling kernels and keeping their code, with a stand-in for NVRTC."""

from pathlib import Path
from typing import Any

import platformdirs
import pytest

from exo_node.mtp.kernels import compiler

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

    def nvrtcGetCUBIN(self, _: Any, held: Any) -> int:
        held.raw = CODE
        return 0

    def nvrtcGetProgramLogSize(self, _: Any, size: Any) -> int:
        size._obj.value = len(self.log)
        return 0

    def nvrtcGetProgramLog(self, _: Any, held: Any) -> int:
        held.raw = self.log.encode()
        return 0


def made(library: Any, folder: Path | None, version: str = "NVRTC 13.0") -> compiler.Compiler:
    return compiler.Compiler(library, version, "sm_90", (), folder)


def test_code_is_compiled_once_a_machine(tmp_path: Path) -> None:
    library = Library()
    assert made(library, tmp_path).compiled("text") == CODE
    assert made(library, tmp_path).compiled("text") == CODE and library.compiled == 1
    assert made(library, tmp_path).compiled("other") == CODE and library.compiled == 2
    assert made(library, tmp_path, "NVRTC 13.1").compiled("text") == CODE
    assert library.compiled == library.destroyed == 3


def test_code_that_is_not_whole_is_compiled_anew(tmp_path: Path) -> None:
    library = Library()
    _ = made(library, tmp_path).compiled("text")
    [kept] = tmp_path.iterdir()
    _ = kept.write_bytes(kept.read_bytes()[:-1])
    assert made(library, tmp_path).compiled("text") == CODE and library.compiled == 2
    assert made(library, tmp_path).compiled("text") == CODE and library.compiled == 2


def test_without_a_folder_of_our_own_nothing_is_kept() -> None:
    library = Library()
    for _ in range(2):
        assert made(library, None).compiled("text") == CODE
    assert library.compiled == 2


def test_a_folder_that_takes_no_code_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert made(Library(), tmp_path).compiled("text") == CODE
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_refused_says_why() -> None:
    library = Library('exo.cu(3): warning: x\nexo.cu(4): error: identifier "y" is undefined\nmore')
    with pytest.raises(compiler.CannotCompile, match='error: identifier "y" is undefined'):
        _ = made(library, None).compiled("text")
    assert library.destroyed == 1


def test_a_folder_that_others_may_write_to_keeps_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*_: Any, **__: Any) -> Path:
        return tmp_path

    monkeypatch.setattr(platformdirs, "user_cache_path", here)
    folder = compiler.private_folder()
    assert folder is not None and folder == tmp_path / "kernels"
    folder.chmod(0o777)
    assert compiler.private_folder() is None


def test_every_kernels_text_is_complete() -> None:
    folder = Path(compiler.__file__).parent
    for file in folder.glob("*.cuh"):
        text = compiler.text_of(file.name, folder)
        assert "#include <cuda_bf16.h>" in text and "#pragma once" not in text
        assert text.count("namespace exo {") == text.count("}  // namespace exo")
