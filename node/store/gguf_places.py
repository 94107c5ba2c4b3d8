"""GGUF files on this disk: in folders of models, and those that Ollama and LM Studio keep. Blocks.

exo-node does not run them; `exo-node models import` makes a model of one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...placement.errors import ModelNotFound

SUFFIX: Final = ".gguf"
_DEPTHS: Final = ("*.gguf", "*/*.gguf", "*/*/*.gguf")
_IGNORED: Final = re.compile(r".*mmproj.*|.*-(?!0*1-)\d+-of-\d+\.gguf", re.IGNORECASE)
"""Towers of models that read images, and the later parts of a divided file."""
_MODEL_LAYER: Final = "application/vnd.ollama.image.model"
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFEST_BYTES: Final = 1 << 20
_OLLAMA: Final = (".ollama/models", "/usr/share/ollama/.ollama/models")
_LM_STUDIO: Final = (".lmstudio/models", ".cache/lm-studio/models")


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """A file, and its name in lists: its path below the folder, or Ollama's name of the model."""

    id: str
    path: Path

    @property
    def import_name(self) -> str:
        """The name of the model that is made of it, unless another is given."""
        name = self.id.rpartition("/")[2].replace(":", "-")
        return name.removesuffix(SUFFIX)

    @property
    def fault(self) -> ModelNotFound:
        """Why it cannot be used as it is, with the remedy; names no folder of this machine."""
        return ModelNotFound(
            f"{self.id} is a GGUF file, which does not run as it is; `exo-node models import "
            f"{self.id}` makes a model of it",
            param="model",
        )

    def entry(self) -> dict[str, Any]:
        """The file's entry in a list of models."""
        return {
            "id": self.id,
            "downloaded": True,
            "loaded": False,
            "format": "GGUF",
            "error": self.fault.message,
        }


def in_model_folders(folders: Iterable[Path]) -> list[GgufPlace]:
    """The files of `--models-dir` folders, up to two folders deep; of one name the first counts."""
    places: dict[str, GgufPlace] = {}
    for root in folders:
        for depth in _DEPTHS:
            for path in sorted(_glob(root, depth)):
                name = path.relative_to(root).as_posix()
                if not _IGNORED.fullmatch(path.name) and name.isprintable():
                    _ = places.setdefault(name, GgufPlace(name, path))
    return list(places.values())


def of_other_programs(home: Path, environ: Mapping[str, str]) -> list[GgufPlace]:
    """The files of LM Studio and of Ollama, as this user may read them."""
    stores = [Path(environ["OLLAMA_MODELS"])] if environ.get("OLLAMA_MODELS") else []
    stores += [home / folder for folder in _OLLAMA]
    studio = in_model_folders(home / folder for folder in _LM_STUDIO)
    ollama = {place.id: place for store in reversed(stores) for place in _of_ollama(store)}
    return [*studio, *ollama.values()]


def by_name(name: str, places: Iterable[GgufPlace]) -> GgufPlace | None:
    """The file that lists give this name, or the first of the folder with this name."""
    return next((p for p in places if p.id == name or p.id.startswith(f"{name}/")), None)


def by_path(name: str) -> GgufPlace | None:
    """The file, or the first of the folder, at a path that a person names on this machine."""
    path = Path(name).expanduser()
    if path.suffix == SUFFIX and path.is_file():
        return GgufPlace(name, path.absolute())
    places = in_model_folders([path]) if path.is_dir() else []
    return GgufPlace(str(path / places[0].id), places[0].path.absolute()) if places else None


def _of_ollama(store: Path) -> Iterator[GgufPlace]:
    """Each manifest names its blobs: manifests/HOST/NAMESPACE/MODEL/TAG."""
    manifests = store / "manifests"
    for path in sorted(_glob(manifests, "*/*/*/*")):
        host, namespace, model, tag = path.relative_to(manifests).parts
        prefix = "" if host == "registry.ollama.ai" else f"{host}/"
        prefix += "" if namespace == "library" else f"{namespace}/"
        if (blob := _model_blob(path)) is not None:
            file = store / "blobs" / blob
            if file.is_file():
                yield GgufPlace(f"{prefix}{model}:{tag}", file)


def _model_blob(manifest: Path) -> str | None:
    """The blob's file name, or None for a manifest without weights or of another shape."""
    try:
        if not manifest.is_file() or manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return None
        layers: Any = json.loads(manifest.read_bytes())["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    match = _DIGEST.fullmatch(digests[0]) if digests and isinstance(digests[0], str) else None
    return None if match is None else f"sha256-{match[1]}"


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in folder.glob(pattern) if path.is_file()]
    except OSError:
        return []
