"""`exo-node service` on macOS, with a launchctl that answers as launchctl(1) does, races included.

Sources of its behaviour: launchctl(1), launchd.plist(5), and reports of `bootstrap` that fails with
"5: Input/output error" while a service that was booted out still ends.
"""

import os
import plistlib
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from exo_node.node.cli import service
from exo_node.node.cli.service import LABEL
from exo_node.placement.errors import ExoNodeError

LAUNCHCTL = r"""#!/bin/sh
cd "{state}" || exit 64
echo "$@" >> calls
label=$(cat label)
case "$1 $2" in
  "print $label")
    [ -e loaded ] || { echo "Could not find service \"$label\"" >&2; exit 113; }
    printf '%s = {\n\tstate = %s\n\tlast exit code = %s\n' "$label" "$(cat loaded)" "$(cat code)"
    printf '\tresource coalition = {\n\t\tstate = active\n\t}\n\tprogram = \377\n}\n'
    ;;
  "print "*) [ -e session ] || { echo "Could not find domain" >&2; exit 112; } ;;
  "enable "*) rm -f disabled ;;
  "bootout $label")
    [ -e loaded ] || { echo "Boot-out failed: 3: No such process" >&2; exit 3; }
    lasts=0.5; [ -e slow ] && lasts=$(cat slow)
    (sleep $lasts; rm -f loaded; sleep 0.3; rm -f settling) >/dev/null 2>&1 &
    touch settling
    [ -e slow ] && { echo "Boot-out failed: 36: Operation now in progress" >&2; exit 36; }
    ;;
  "bootstrap "*)
    if [ -e loaded ] || [ -e settling ] || [ -e disabled ]
    then echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; fi
    [ -e "$3" ] || { echo "Bootstrap failed: 2: No such file" >&2; exit 2; }
    echo running > loaded
    ;;
  *) exit 64 ;;
esac
"""


@dataclass
class Mac:
    home: Path
    state: Path

    @property
    def agent(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.state / "calls").read_text().splitlines()]

    def job(self) -> dict[str, Any]:
        return plistlib.loads(self.agent.read_bytes())


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    mac = Mac(tmp_path / "home", tmp_path / "state")
    for folder in (mac.home, mac.state, tmp_path / "bin"):
        folder.mkdir()
    _ = (mac.state / "label").write_text(f"gui/{os.getuid()}/{LABEL}")
    _ = (mac.state / "code").write_text("0")
    (mac.state / "session").touch()
    program = tmp_path / "bin" / "launchctl"
    _ = program.write_text(LAUNCHCTL.replace("{state}", str(mac.state)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(mac.home))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(service, "DAEMONS", tmp_path / "daemons")
    return mac


def status(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as ended:
        service.status()
    return ended.value.exit_code, "".join(capsys.readouterr())


def test_it_is_installed_again_though_bootout_returns_before_the_end(
    mac: Mac, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(capsys)[0] == 1
    service.install(str(mac.home / "data"))
    _ = capsys.readouterr()
    assert status(capsys) == (0, f"running, {mac.agent}\n")
    assert mac.job()["ProgramArguments"][-6:-4] == ["--data-dir", str(mac.home / "data")]
    service.install(str(mac.home / "other"))  # the first one ends half a second later
    assert status(capsys)[0] == 0
    assert mac.job()["ProgramArguments"][-5] == str(mac.home / "other")
    assert mac.calls().count("bootstrap") >= 2
    service.uninstall(yes=True)
    assert not mac.agent.exists()


def test_one_that_ends_slowly_is_waited_for(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.TIMES, "service_settle_s", 2.0, raising=True)
    service.install(str(mac.home / "data"))
    _ = (mac.state / "slow").write_text("4")
    service.install(str(mac.home / "other"))
    assert mac.job()["ProgramArguments"][-5] == str(mac.home / "other")


def test_a_daemon_and_an_agent_are_not_both_installed(mac: Mac, tmp_path: Path) -> None:
    (tmp_path / "daemons").mkdir()
    (tmp_path / "daemons" / f"{LABEL}.plist").touch()
    with pytest.raises(ExoNodeError, match="sudo exo-node service uninstall --system"):
        service.install(str(mac.home / "data"))
    assert not mac.agent.exists()


def test_one_that_was_switched_off_is_enabled_first(mac: Mac) -> None:
    (mac.state / "disabled").touch()
    service.install(str(mac.home / "data"))
    assert mac.calls()[-2:] == ["enable", "bootstrap"]


@pytest.mark.parametrize(
    ("state", "code", "why"),
    [
        ("not running", "2", "it ended with exit code 2"),
        ("spawn scheduled", "(never exited)", "its state is spawn scheduled"),
        ("spawn scheduled", "78: EX_CONFIG", "it ended with exit code 78: EX_CONFIG"),
    ],
)
def test_the_status_tells_installed_from_running(
    mac: Mac, capsys: pytest.CaptureFixture[str], state: str, code: str, why: str
) -> None:
    service.install(str(mac.home / "data"))
    _ = (mac.state / "loaded").write_text(state)
    _ = (mac.state / "code").write_text(code)
    code_of_status, text = status(capsys)
    assert code_of_status == 1 and f"installed, not running ({why})" in text
    assert "Login Items & Extensions" in text and "exo-node.log" in text


def test_without_a_session_nothing_is_written(mac: Mac) -> None:
    (mac.state / "session").unlink()
    with pytest.raises(ExoNodeError, match=r"nothing was installed.*Could not find domain"):
        service.install(str(mac.home / "data"))
    assert not mac.agent.exists()


def test_a_refusal_that_lasts_is_an_error(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.TIMES, "service_settle_s", 0.3, raising=True)
    (mac.state / "settling").touch()
    with pytest.raises(ExoNodeError, match=r"is written, but.*5: Input/output error"):
        service.install(str(mac.home / "data"))


def test_a_daemon_is_roots_and_runs_as_the_user_who_called_sudo(
    mac: Mac, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    with pytest.raises(ExoNodeError, match="use `sudo`"):
        service.install(system=True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_USER", raising=False)
    with pytest.raises(ExoNodeError, match="use `sudo`"):
        service.install(system=True)
    monkeypatch.setenv("SUDO_USER", "ann")
    monkeypatch.setattr(pwd, "getpwnam", {"ann": SimpleNamespace(pw_dir=str(mac.home))}.get)
    manager = service.manager_of("darwin", system=True)
    assert manager.file == tmp_path / "daemons" / f"{LABEL}.plist"
    mac.agent.parent.mkdir(parents=True)
    mac.agent.touch()
    with pytest.raises(ExoNodeError, match=r"nothing was installed.*`exo-node service uninstall`"):
        service.install(system=True)
    assert manager.start[-1] == ["launchctl", "bootstrap", "system", str(manager.file)]
    job = plistlib.loads(manager.definition(["exo-node", "start"]))
    assert (job["UserName"], job["EnvironmentVariables"]) == ("ann", {"HOME": str(mac.home)})
    with pytest.raises(ExoNodeError, match="enable-linger"):
        _ = service.manager_of("linux", system=True)


def test_a_daemon_finds_its_users_data_by_itself(
    mac: Mac, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that is found for root, who installs it, is not the user's."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "ann")
    monkeypatch.setattr(pwd, "getpwnam", {"ann": SimpleNamespace(pw_dir=str(mac.home))}.get)
    _ = (mac.state / "label").write_text(f"system/{LABEL}")
    for given in (None, str(tmp_path / "data")):
        service.install(given, system=True)
        job = plistlib.loads((tmp_path / "daemons" / f"{LABEL}.plist").read_bytes())
        words = job["ProgramArguments"]
        own = words[words.index("start") + 1 : words.index("--environment-file")]
        assert own == ([] if given is None else ["--data-dir", given])
