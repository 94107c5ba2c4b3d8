"""Which checkpoints are listed as reading images."""

import json
import shutil
from pathlib import Path

import pytest
from models import DEMO
from pictures import DEEP, DEEP_MIXTURE, DENSE, GEMMA, MISTRAL, MIXTURE

from exo_node.shard.checkpoint import vision
from exo_node.shard.checkpoint.vision import may_read_images


@pytest.mark.parametrize(
    "folder", [DENSE, MIXTURE, DEEP, DEEP_MIXTURE, GEMMA, MISTRAL], ids=lambda folder: folder.name
)
def test_models_with_a_tower_read_images_where_the_extra_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert may_read_images(folder) == vision.has_extra()
    monkeypatch.setattr(vision, "has_extra", lambda: False)
    assert not may_read_images(folder)


def test_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "has_extra", lambda: True)
    assert not may_read_images(DEMO)
    assert not may_read_images(tmp_path)
    _ = shutil.copyfile(DENSE / "config.json", tmp_path / "config.json")
    assert may_read_images(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changed in ({"vision_config": None}, {"model_type": "gemma3n"}):
        _ = (tmp_path / "config.json").write_text(json.dumps(config | changed))
        assert not may_read_images(tmp_path)
    flash = config | {"model_type": "qwen4_exp"}
    for deep in ([], [1]):
        flash["vision_config"] = config["vision_config"] | {"deepstack_visual_indexes": deep}
        _ = (tmp_path / "config.json").write_text(json.dumps(flash))
        assert may_read_images(tmp_path) == (not deep)
    _ = (tmp_path / "config.json").write_text("{")
    assert not may_read_images(tmp_path)
