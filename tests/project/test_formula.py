"""The Homebrew formula: made of what pip finds in an index of this test, and run by stand-ins."""

import base64
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".github" / "formula.py"
FORMULA: Mapping[str, Any] = runpy.run_path(str(SCRIPT))
PINS: Mapping[str, str] = FORMULA["pins"]((ROOT / "constraints.txt").read_text())
ANYIO, METAL = f"anyio=={PINS['anyio']}", f"mlx-metal=={PINS['mlx-metal']}"
PAGE = "https://forge.example/somebody/exo-node"
SYSTEMS = ("14_0", "15_0", "26_0")


def make_wheel(folder: Path, requirement: str, tag: str, *needs: str) -> Path:
    """A wheel of nothing but its metadata."""
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in needs),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
        for path, text in texts.items()
    ]
    texts[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    file = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return file


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclass(frozen=True)
class Index:
    """A package index on loopback with its wheels."""

    folder: Path
    url: str

    def add(self, requirement: str, tag: str, *needs: str) -> str:
        """Adds a wheel; returns its SHA-256."""
        page = self.folder / "simple" / requirement.partition("==")[0]
        page.mkdir(parents=True, exist_ok=True)
        file = make_wheel(page, requirement, tag, *needs)
        links = [f'<a href="{each.name}">{each.name}</a>' for each in page.glob("*.whl")]
        _ = (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body>")
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def variables(self) -> dict[str, str]:
        """pip with this index alone, whatever this machine sets."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
        own = {"PIP_INDEX_URL": f"{self.url}/simple", "PIP_CONFIG_FILE": os.devnull}
        return {**kept, **own, "PIP_NO_CACHE_DIR": "1", "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def index(tmp_path: Path) -> Generator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Index(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def product(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, "exo-node==7.8.9", "py3-none-any", "anyio", "mlx-metal>=0.1")


def reports(index: Index, product: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """pip's report for each system, with addresses as those of an index that others reach."""
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    for name, text in index.variables().items():
        monkeypatch.setenv(name, text)
    texts = {each: json.dumps(FORMULA["pip_report"](product, each)) for each in SYSTEMS}
    return {
        each: json.loads(text.replace(index.url, "https://index.example"))
        for each, text in texts.items()
    }


def formula_of(product: Path, found: Mapping[str, Any], url: str = f"{PAGE}/7.8.9/") -> str:
    systems = {each: FORMULA["resources"](found[each], PINS) for each in SYSTEMS}
    return FORMULA["formula"](product, f"{url}{product.name}", PAGE, systems)


BREW = """
require "json"
require "pathname"
$said = { "resources" => [], "depends" => [] }
class Version < String; end
class Resource
  attr_accessor :name, :system
  def initialize(name, system) = (@name, @system = name, system)
  def url(text, using: nil) = (@url = text; @using = using)
  def sha256(text) = (@sha256 = text)
  def to_h
    { "name" => @name, "system" => @system, "url" => @url, "using" => @using.to_s,
      "sha256" => @sha256 }
  end
end
class Formula
  class << self
    def desc(_) = nil
    def homepage(text) = $said["homepage"] = text
    def url(text, using: nil) = ($said["url"] = text; $said["using"] = using.to_s)
    def version(text) = $said["version"] = text
    def sha256(text) = $said["sha256"] = text
    def license(text) = $said["license"] = text
    def depends_on(what) = $said["depends"] << what.to_s
    def on_sonoma(&block) = within("sonoma", &block)
    def on_sequoia(&block) = within("sequoia", &block)
    def on_tahoe(or_newer, &block) = within("tahoe #{or_newer}", &block)
    def within(system) = (@system = system; yield; @system = nil)
    def resource(name, &block)
      made = Resource.new(name, @system)
      made.instance_eval(&block)
      $said["resources"] << made.to_h
    end
    def service(&block) = $said["service"] = !block.nil?
    def test(&block) = $said["test"] = !block.nil?
  end
end
load ARGV[0]
$said["methods"] = ExoNode.instance_methods(false).map(&:to_s).sort
puts JSON.dump($said)
"""


def by_brew(text: str, folder: Path) -> Any:
    """What Homebrew's classes would be told by a formula, run by Ruby."""
    if shutil.which("ruby") is None:
        pytest.skip("ruby is not installed, so the formula was not run")
    (folder / "brew.rb").write_text(BREW)
    (folder / "exo-node.rb").write_text(text)
    command = ["ruby", "-w", folder / "brew.rb", folder / "exo-node.rb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_has_every_wheel_with_its_sum_and_the_system_it_is_for(
    index: Index, product: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anyio = index.add(ANYIO, "py3-none-any")
    metal = {each: index.add(METAL, f"py3-none-macosx_{each}_arm64") for each in SYSTEMS}
    _ = index.add("anyio==99.0", "py3-none-any")  # newer than the pin
    text = formula_of(product, reports(index, product, monkeypatch))
    assert "127.0.0.1" not in text and str(tmp_path) not in text
    said = by_brew(text, tmp_path)
    assert said["sha256"] == hashlib.sha256(product.read_bytes()).hexdigest()
    assert (said["version"], said["url"]) == ("7.8.9", f"{PAGE}/7.8.9/{product.name}")
    wheels = {(each["name"], each["system"]): each["sha256"] for each in said["resources"]}
    assert wheels == {
        ("anyio", None): anyio,
        ("mlx-metal", "sonoma"): metal["14_0"],
        ("mlx-metal", "sequoia"): metal["15_0"],
        ("mlx-metal", "tahoe or_newer"): metal["26_0"],
    }
    assert {each["using"] for each in (said, *said["resources"])} == {"nounzip"}
    assert {"install", "post_install"} <= set(said["methods"]) and said["service"] and said["test"]


def test_what_pip_cannot_find_ends_the_script_with_no_formula(index: Index, product: Path) -> None:
    _ = index.add(ANYIO, "py3-none-any")
    arguments = ["--wheel", product, "--url", f"{PAGE}/{product.name}", "--homepage", PAGE]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=index.variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "mlx-metal" in done.stderr and "no wheels for macOS 14_0" in done.stderr


def entry(name: str = "anyio", version: str = PINS["anyio"], **download: Any) -> dict[str, Any]:
    info = {
        "url": f"https://index.example/{name}-{version}-py3-none-any.whl",
        "archive_info": {"hashes": {"sha256": "0" * 64}},
    }
    return {"metadata": {"name": name, "version": version}, "download_info": {**info, **download}}


@pytest.mark.smoke
def test_wheels_that_all_systems_share_stand_once(product: Path) -> None:
    shared = [entry(), entry(name="mlx-metal", version=PINS["mlx-metal"])]
    text = formula_of(product, {each: {"install": shared} for each in SYSTEMS})
    assert text.count("resource ") == 2 and " do\n    resource" not in text


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry(version="0.0.1"), "not in constraints.txt"),
        (entry(name="unheard-of"), "not in constraints.txt"),
        (entry(url="http://127.0.0.1:1/a.whl"), "over https"),
        (entry(url="file:///a.whl"), "over https"),
        (entry(url="https://index.example/a.tar.gz"), "over https"),
        (entry(url='https://index.example/"\n  system "x".whl'), "over https"),
        (entry(url="https://index.example/#{x}.whl"), "over https"),
        (entry(archive_info={}), "no SHA-256"),
        (entry(archive_info={"hashes": {"sha256": '"'}}), "no SHA-256"),
    ],
)
def test_what_nobody_else_could_install_is_refused(wrong: Any, words: str) -> None:
    with pytest.raises(FORMULA["Unusable"], match=words):
        FORMULA["resources"]({"install": [wrong]}, PINS)


@pytest.mark.smoke
def test_another_wheel_or_address_is_refused(product: Path) -> None:
    nothing: dict[str, Any] = {each: {"install": list[Any]()} for each in SYSTEMS}
    with pytest.raises(FORMULA["Unusable"], match="no wheel of exo-node"):
        _ = formula_of(product, nothing, "http://forge.example/")
    other = product.with_name("other-1.0-py3-none-any.whl")
    with pytest.raises(FORMULA["Unusable"], match="no wheel of exo-node"):
        _ = formula_of(other, nothing)
