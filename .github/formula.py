"""Writes the Homebrew formula of a wheel, with the versions of `constraints.txt`, to stdout.

    python .github/formula.py --wheel WHEEL --url ADDRESS --homepage ADDRESS

`--url`: where the wheel will be. Run it with Python 3.13 on macOS, where requirements that are for
macOS alone count, and where pip reaches its package index. Nothing is installed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.13"
SYSTEMS = {"14_0": "on_sonoma", "15_0": "on_sequoia", "26_0": "on_tahoe :or_newer"}
"""Versions of macOS whose wheels may differ, the oldest first, and Homebrew's words for them."""
ADDRESS = re.compile(r"https://[A-Za-z0-9._~/%+-]+\.whl")
FORMULA = """\
# Made by .github/formula.py from constraints.txt; do not edit.
class ExoNode < Formula
  desc "Run large models on the Macs that you own"
  homepage "{homepage}"
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

{resources}
  def install
    wheels = libexec/"wheels"
    resources.each {{ |wheel| wheel.stage {{ wheels.install Dir["*.whl"] }} }}
    wheels.install Dir["*.whl"]
    (bin/"exo-node").write <<~SCRIPT
      #!#{{opt_libexec}}/venv/bin/python
      from exo_node.node.cli.main import main
      main()
    SCRIPT
    chmod 0755, bin/"exo-node"
  end

  # Not in `install`, whose libraries Homebrew rewrites: those of wheels are signed.
  def post_install
    system formula_python, "-m", "venv", "--clear", libexec/"venv"
    system libexec/"venv/bin/python", "-m", "pip", "install", "--no-index", "--no-deps",
           *Dir[libexec/"wheels/*.whl"]
  end

  def formula_python
    Formula["python@{python}"].opt_bin/"python{python}"
  end

  service do
    run [opt_bin/"exo-node", "start"]
    keep_alive crashed: true
    log_path var/"log/exo-node.log"
    error_log_path var/"log/exo-node.log"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/exo-node --version")
  end
end
"""


class Unusable(Exception):
    """An installation that no formula can repeat."""


@dataclass(frozen=True, order=True)
class Resource:
    """One wheel."""

    name: str
    url: str
    sha256: str

    def ruby(self, indent: str) -> str:
        lines = (
            f'resource "{self.name}" do',
            f'  url "{self.url}", using: :nounzip',
            f'  sha256 "{self.sha256}"',
            "end",
        )
        return "".join(f"{indent}{line}\n" for line in lines)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(constraints: str) -> dict[str, str]:
    """The version of each package."""
    lines = (line.partition(";")[0].strip() for line in constraints.splitlines())
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def pip_report(wheel: Path, system: str) -> Mapping[str, Any]:
    """What pip would install with a wheel on one version of macOS."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--python-version", PYTHON]
    command += ["--platform", f"macosx_{system}_arm64", "--constraint", ROOT / "constraints.txt"]
    command += ["--target", "nothing-is-written"]  # else pip before 24 refuses another platform
    done = subprocess.run([*command, wheel], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise Unusable(f"pip finds no wheels for macOS {system}: its words are above")
    return json.loads(done.stdout)


def resources(report: Mapping[str, Any], pinned: Mapping[str, str]) -> list[Resource]:
    """The wheels of a report but the product's own. Raises Unusable."""
    found = list[Resource]()
    for each in report["install"]:
        name, version = normal(each["metadata"]["name"]), each["metadata"]["version"]
        if name == "exo-node":
            continue
        url = each["download_info"]["url"].partition("#")[0]
        sha256 = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if pinned.get(name) != version:
            raise Unusable(f"{name} {version} is not in constraints.txt; bring it up to date")
        if not ADDRESS.fullmatch(url):
            raise Unusable(f"{name}: {url} is no wheel that others can download over https")
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise Unusable(f"{name}: the index names no SHA-256 of {url}")
        found.append(Resource(name, url, sha256))
    return sorted(found)


def formula(wheel: Path, url: str, homepage: str, systems: Mapping[str, Sequence[Resource]]) -> str:
    """The formula's text. `systems`: the wheels for each of SYSTEMS."""
    match = re.fullmatch(r"exo_node-([0-9][0-9a-z.]*)-py3-none-any\.whl", wheel.name)
    if match is None or not ADDRESS.fullmatch(url) or not url.endswith(f"/{wheel.name}"):
        raise Unusable(f"{wheel} and {url} are no wheel of exo-node and its address")
    if not re.fullmatch(r"https://[A-Za-z0-9._~/%+-]+", homepage):
        raise Unusable(f"{homepage} is no address of a page")
    everywhere = set.intersection(*map(set, systems.values()))
    text = "".join(each.ruby("  ") + "\n" for each in sorted(everywhere))
    for system, wheels in systems.items():
        if own := sorted(set(wheels) - everywhere):
            inside = "\n".join(each.ruby("    ") for each in own)
            text += f"  {SYSTEMS[system]} do\n{inside}  end\n\n"
    return FORMULA.format(
        homepage=homepage,
        url=url,
        version=match[1],
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        python=PYTHON,
        resources=text.rstrip("\n") + "\n",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The Homebrew formula of a wheel")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--homepage", required=True)
    options = parser.parse_args()
    pinned = pins((ROOT / "constraints.txt").read_text())
    try:
        systems = {
            system: resources(pip_report(options.wheel, system), pinned) for system in SYSTEMS
        }
        print(formula(options.wheel, options.url, options.homepage, systems), end="")
    except Unusable as fault:
        sys.exit(f"formula.py: {fault}")


if __name__ == "__main__":
    main()
