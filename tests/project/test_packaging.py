"""The wheels hold what git tracks of their folders, and nothing else at their top level."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = ("node", "placement", "proto", "shard", "mtp", "dashboard")
BUILD_INPUTS = (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked() -> set[str]:
    """The files of the checkout: those of git, and new ones that it does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so nothing says which files belong to it")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the product's wheel."""
    names = tracked()
    inputs = [name for name in names if name.partition("/")[0] in FOLDERS or name in BUILD_INPUTS]
    return _built(inputs, tmp_path_factory, ".")


def _built(names: Iterable[str], temporary: pytest.TempPathFactory, project: str) -> set[str]:
    """The names in a wheel that is built by `_wheel_of`."""
    with zipfile.ZipFile(_wheel_of(names, temporary, project)) as archive:
        return set(archive.namelist())


def _wheel_of(names: Iterable[str], temporary: pytest.TempPathFactory, project: str) -> Path:
    """A wheel that is built offline from a copy: builds leave their traces behind."""
    source, out = temporary.mktemp("source"), temporary.mktemp("wheel")
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, source / project]
    subprocess.run(command, check=True)
    [file] = out.glob("*.whl")
    return file


def test_the_wheel_holds_the_tracked_files_of_the_six_folders(wheel: set[str]) -> None:
    shipped = {name.removeprefix("exo_node/") for name in wheel if name.startswith("exo_node/")}
    tracked_files = {name for name in tracked() if name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    assert sorted(tracked_files - shipped) == [], (
        "missing: add a line to package-data in pyproject.toml"
    )
    assert sorted(shipped - tracked_files) == []


def test_the_wheel_installs_no_package_but_its_own(wheel: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"exo_node"}


def test_the_wheel_holds_the_demo_model_its_recipe_the_cards_and_the_page(wheel: set[str]) -> None:
    demo = "exo_node/shard/models/demo"
    for name in (
        f"{demo}/model-00001-of-00003.safetensors",
        f"{demo}/tokenizer.json",
        f"{demo}/chat_template.jinja",
        f"{demo}/recipe/train.py",
        "exo_node/placement/cards/demo.toml",
        "exo_node/dashboard/static/index.html",
        "exo_node/dashboard/static/vendor/htm-preact.module.js",
        "exo_node/dashboard/static/vendor/LICENSE-preact.txt",
        "exo_node/proto/peer.proto",
        *(f"exo_node/{folder}/py.typed" for folder in FOLDERS),
    ):
        assert name in wheel


def test_the_benches_are_a_wheel_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    inputs = {name for name in tracked() if name.startswith("bench/exo_node_bench/")}
    sources = [*inputs, "pyproject.toml", "bench/pyproject.toml", "bench/setup.py"]
    wheel = _wheel_of(sources, tmp_path_factory, "bench")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == {name.removeprefix("bench/") for name in inputs}
    fields = metadata.splitlines()
    version = PROJECT["version"]
    assert f"Version: {version}" in fields and f"Requires-Dist: exo-node=={version}" in fields


def test_the_version_stands_in_one_place() -> None:
    """Else a release says two things. What follows from it is computed."""
    places = re.compile(rf"(?<![\w.]){re.escape(PROJECT['version'])}(?![\w.])")
    kinds = (".toml", ".py", ".sh", ".yml")
    texts = {name: (ROOT / name).read_text() for name in tracked() if name.endswith(kinds)}
    having = {
        name
        for name, text in texts.items()
        if not name.startswith("tests/") and places.search(re.sub(r"such as .*", "", text))
    }
    assert having == {"pyproject.toml"}
    assert len(places.findall(texts["pyproject.toml"])) == 1


def test_the_pins_are_the_packages_of_an_install() -> None:
    here = {_normal(pin.name) for pin in _pins() if pin.marker is None or pin.marker.evaluate()}
    assert sorted(_needed() - here) == []
    assert sorted(here - _needed()) == []


def test_a_pin_is_one_version_and_no_address() -> None:
    loose = [pin for pin in _pins() if pin.url or not re.fullmatch(r"==[^*]+", str(pin.specifier))]
    assert loose == []
    assert len({_normal(pin.name) for pin in _pins()}) == len(_pins())


def test_pins_satisfy_the_projects_requirements() -> None:
    pinned = {_normal(pin.name): str(pin.specifier).removeprefix("==") for pin in _pins()}
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["dev"], *extras["clients"], *_OF_BENCHES]
    wrong = [
        text
        for text in requirements
        if not Requirement(text).specifier.contains(pinned[_normal(Requirement(text).name)])
    ]
    assert wrong == []


_OF_BENCHES = re.findall(r"\"(matplotlib[^\"]*)\"", (ROOT / "bench" / "setup.py").read_text())


def _pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _needed() -> set[str]:
    """The packages that `make test` installs here, by the installed metadata."""
    extras = {"dev", "clients", *({"cpu"} if sys.platform == "linux" else ())}
    keys = {"mlx-vlm[]"}  # by the Makefile, without its requirements
    waiting = [(Requirement(text), set[str]()) for text in PROJECT["dependencies"]]
    waiting += [(Requirement(text), set[str]()) for text in _OF_BENCHES]
    waiting += [
        (Requirement(text), set[str]())
        for extra in extras
        for text in PROJECT["optional-dependencies"][extra]
    ]
    while waiting:
        requirement, within = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in (within or {""})):
            continue
        name = _normal(requirement.name)
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key in keys:
            continue
        keys.add(key)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        waiting += [(Requirement(text), requirement.extras) for text in requires]
    return {key.partition("[")[0] for key in keys} - {
        "pip"
    }  # the installer, which llm requires too


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
