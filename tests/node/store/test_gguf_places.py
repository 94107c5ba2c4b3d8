"""GGUF files on a disk, as lists name them, and the folders of other programs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from models import make_checkpoint

from exo_node.node.store.gguf_places import by_name, by_path, in_model_folders, of_other_programs
from exo_node.node.store.library import ModelLibrary
from exo_node.placement.errors import ModelNotFound
from exo_node.placement.ids import ModelId


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    _ = path.write_bytes(b"GGUF")
    return path


def in_ollama(store: Path, name: str, manifest: object = None) -> Path:
    """A model as Ollama keeps it; returns the blob."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    other = {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:" + "0" * 64}
    path = store / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    _ = path.write_text(json.dumps({"layers": [other, layer]} if manifest is None else manifest))
    return touch(store / "blobs" / f"sha256-{digest}")


def test_files_of_folders_are_listed_with_the_command(tmp_path: Path) -> None:
    root, own = tmp_path / "models", tmp_path / "own"
    for name in (
        "flat.gguf", "folder/one.gguf", "me/model/x-Q4_K_M.gguf", "me/model/x-Q8_0.gguf",
        "me/model/mmproj-x.gguf", "me/big/y-00001-of-00003.gguf", "me/big/y-00002-of-00003.gguf",
        "too/deep/for/this.gguf", "me/model/bad\nname.gguf",
    ):  # fmt: skip
        _ = touch(root / name)
    _ = make_checkpoint(own / "flat", "llama")
    library = ModelLibrary((root, own), offline=True)
    models = library.scan()
    assert "flat" in models
    assert {str(id) for id in library.broken} == {
        "folder/one.gguf", "me/model/x-Q4_K_M.gguf", "me/model/x-Q8_0.gguf",
        "me/big/y-00001-of-00003.gguf",
    }  # fmt: skip
    message = library.broken[ModelId("folder/one.gguf")].message
    assert "`exo-node models import folder/one.gguf`" in message and str(tmp_path) not in message
    for name in ("folder/one.gguf", "me/model"):
        with pytest.raises(ModelNotFound, match="models import"):
            _ = library.get(ModelId(name))


def test_a_path_is_known_to_commands_and_not_to_requests(tmp_path: Path) -> None:
    """A client must not learn which files there are."""
    file = touch(tmp_path / "secret" / "x.gguf")
    library = ModelLibrary(offline=True)
    for path in (file, file.parent):
        with pytest.raises(ModelNotFound, match="models import"):
            _ = library.folder(str(path))
        with pytest.raises(ModelNotFound) as error:
            _ = library.get(ModelId(str(path)))
        assert "models import" not in error.value.message
    place = by_path(str(file.parent))
    assert place is not None and place.path == file and place.import_name == "x"


def test_ollama_and_lm_studio_are_read(tmp_path: Path) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    ollama = home / ".ollama" / "models"
    blob = in_ollama(ollama, "registry.ollama.ai/library/qwen2.5-coder/0.5b")
    _ = in_ollama(ollama, "registry.ollama.ai/me/mine/latest")
    _ = in_ollama(ollama, "hf.co/bartowski/Some-GGUF/Q4_K_M")
    gone = in_ollama(ollama, "registry.ollama.ai/library/gone/latest")
    gone.unlink()
    other = in_ollama(moved, "registry.ollama.ai/library/qwen2.5-coder/0.5b")
    _ = touch(home / ".lmstudio" / "models" / "me" / "studio" / "z.gguf")
    places = of_other_programs(home, {})
    assert {place.id for place in places} == {
        "qwen2.5-coder:0.5b", "me/mine:latest", "hf.co/bartowski/Some-GGUF:Q4_K_M",
        "me/studio/z.gguf",
    }  # fmt: skip
    coder = by_name("qwen2.5-coder:0.5b", places)
    assert coder is not None and coder.path == blob and coder.import_name == "qwen2.5-coder-0.5b"
    first = by_name("qwen2.5-coder:0.5b", of_other_programs(home, {"OLLAMA_MODELS": str(moved)}))
    assert first is not None and first.path == other
    assert in_model_folders([tmp_path / "nowhere"]) == []


BAD: list[Any] = [
    [], 5, "x", {}, {"layers": 5}, {"layers": [5]}, {"layers": [{}]},
    *(
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]}
        for digest in (5, None, "", "sha256:../../../etc/passwd", "sha256:" + "0" * 63, ["x"])
    ),
]  # fmt: skip


@pytest.mark.parametrize("manifest", BAD)
def test_a_manifest_of_another_shape_is_no_model(manifest: Any, tmp_path: Path) -> None:
    store = tmp_path / ".ollama" / "models"
    _ = in_ollama(store, "registry.ollama.ai/library/x/latest", manifest)
    assert of_other_programs(tmp_path, {}) == []
