"""`exo-node report --share` as a command: what it measures, what it keeps to itself, its end."""

import getpass
import json
import platform
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from api_stub import COMMAND, environment, exo_node
from interrupts import ending_on_interrupt
from small import small_checkpoint

from exo_node.shard.tools.share.result import SharedResult

USER, HOST, KEY = "ada-lovelace", "adas-macbook", "sk-not-for-anybody"
PROMPT = "whisper-the-launch-codes"
SECRETS = (USER, HOST, KEY, PROMPT)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose every name is private, with a model of its owner's."""
    home = tmp_path_factory.mktemp("homes") / USER
    folder = home / f"{KEY}-models" / f"{USER}-finetune"
    folder.parent.mkdir(parents=True)
    _ = shutil.copytree(small_checkpoint(), folder)
    template = folder / "chat_template.jinja"
    text = template.read_text() if template.exists() else ""
    _ = template.write_text(f"{{# {PROMPT} #}}{text}")
    return home


def variables(home: Path) -> dict[str, str]:
    data = home / "data"
    return {
        "HOME": str(home),
        "USER": USER,
        "LOGNAME": USER,
        "HOSTNAME": HOST,
        "HF_TOKEN": KEY,
        "OPENAI_API_KEY": KEY,
        "EXO_NAME": HOST,
        "EXO_API_KEY": KEY,
        "EXO_CLUSTER_KEY": KEY,
        "EXO_DATA_DIR": str(data),
        "EXO_MODELS_DIR": str(home / f"{KEY}-models"),
    }


@pytest.fixture(scope="module")
def shared(home: Path) -> tuple[str, str]:
    """The file's text, and what the command printed."""
    file = home / "out" / "mine.json"
    file.parent.mkdir()
    result = subprocess.run(
        [*COMMAND, "report", str(file), "--share", "--model", f"{USER}-finetune"],
        capture_output=True,
        text=True,
        env=environment(**variables(home)),
        cwd=home,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [each.name for each in file.parent.iterdir()] == ["mine.json"]
    assert "about 3 minutes, 15 at most" in result.stderr.splitlines()[0], "before it starts"
    return file.read_text(), result.stdout


def test_no_secret_is_in_the_file(home: Path, shared: tuple[str, str]) -> None:
    text, printed = shared
    assert printed == text, "what is printed is all that there is"
    for secret in (*SECRETS, str(home), str(Path.home())):
        assert secret.casefold() not in text.casefold()
    words = set(text.replace('"', " ").split())
    assert not words & {platform.node(), getpass.getuser()}


def test_the_figures_are_there(shared: tuple[str, str]) -> None:
    result = SharedResult.model_validate_json(shared[0])
    assert isinstance(result, SharedResult)
    assert (result.model.id, result.model.layers, result.model.max_k > 0) == (None, 4, True)
    identity = result.identity
    assert (identity.verdict, identity.greedy) == ("exact", "bitwise")
    assert identity.parts["greedy"] == identity.parts["blocks"] == "ok" and len(identity.parts) == 6
    speed = result.speed
    assert speed.plain_tok_s and speed.drafted_tok_s and speed.ratio and speed.first_token_s
    assert (speed.prompt_tokens or 0) > 50 and speed.repeats == 3
    assert result.versions.exo_node != "unknown" and result.source is None


def test_ctrl_c_leaves_nothing(home: Path, tmp_path: Path) -> None:
    """Also where a result of an earlier run stands: that one stays as it was."""
    file = tmp_path / "result.json"
    _ = file.write_text("an earlier one")
    arguments = [*COMMAND, "report", str(file), "--share", "--model", f"{USER}-finetune"]
    with ending_on_interrupt():
        process = subprocess.Popen(
            arguments, stderr=subprocess.PIPE, env=environment(**variables(home)), text=True
        )
    with process as started:
        assert started.stderr is not None
        for line in started.stderr:
            if line.startswith("loading"):
                break
        [child] = psutil.Process(started.pid).children()
        started.send_signal(signal.SIGINT)
        _ = started.stderr.read()
        assert started.wait(60) == 130
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    assert file.read_text() == "an earlier one"


def test_what_cannot_be_written_or_measured_is_refused_before_it_starts(tmp_path: Path) -> None:
    absent, folder = str(tmp_path / "no" / "result.json"), str(tmp_path)
    for arguments, words in (
        ((absent, "--share"), "cannot be written"),
        ((folder, "--share"), "cannot be written"),
        ((str(tmp_path / "r.json"), "--share", "--model", "nobody/has-this"), "nobody/has-this"),
        ((str(tmp_path / "r.json"), "--model", "demo"), "--share"),
        ((str(tmp_path / "r.json"), "--share", "--port", "1"), "--port"),
    ):
        result = exo_node("report", *arguments, EXO_DATA_DIR=str(tmp_path / "data"))
        assert result.returncode != 0 and words in result.stderr, result.stderr
        assert "at most" not in result.stderr
    assert [*tmp_path.iterdir()] == [], json.dumps([str(each) for each in tmp_path.iterdir()])
