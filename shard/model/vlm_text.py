"""Text models of mlx-vlm whose caches are plain ones, as mlx-lm's classes of multimodal models have
them: their layers are used as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_vlm.models import switch_layers as vlm_switch_layers

from ...mtp.caches.rollback import Swaps, swap_classes

_SWAPS: Swaps = {
    vlm_switch_layers.SwitchGLU: switch_layers.SwitchGLU,
    vlm_switch_layers.SwitchLinear: switch_layers.SwitchLinear,
}


def text_classes(model: Any, arguments: Any) -> tuple[type[nn.Module], type]:
    """The class of the text model in mlx-vlm's `model`, and that of its arguments.

    `model` and `arguments` are modules of mlx-vlm: of a whole model, and of its config.
    """

    class Model(_TextModel):
        def __init__(self, args: Any) -> None:
            text = getattr(args, "text_config", args)
            own = () if text is args else (args,)
            super().__init__(args, model.LanguageModel(text, *own), model.Model.sanitize)

    class ModelArgs:
        @staticmethod
        def from_dict(config: Mapping[str, Any]) -> Any:
            fields = dict(config)
            if isinstance(fields.get("text_config"), Mapping):
                text = arguments.TextConfig.from_dict(dict(fields["text_config"]))
                fields |= {"text_config": text, "vision_config": None}
            return arguments.ModelConfig.from_dict(fields)

    Model.__module__ = f"{__name__}.{model.__name__}"
    return Model, ModelArgs


class _TextModel(nn.Module):
    """A language model of mlx-vlm without the towers beside it."""

    def __init__(
        self, args: Any, language_model: Any, sanitize: Callable[[Any, dict[str, mx.array]], Any]
    ) -> None:
        super().__init__()
        self.args = self.config = args
        self.language_model = language_model
        self._sanitize = sanitize
        self.vision_model = _NoTower()
        swap_classes(self, _SWAPS)

    def __call__(
        self, inputs: Any, cache: Sequence[Any] | None = None, input_embeddings: Any = None
    ) -> mx.array:
        caches = self.make_cache() if cache is None else cache
        return self.language_model(inputs, cache=caches, inputs_embeds=input_embeddings).logits

    @property
    def layers(self) -> list[Any]:
        return self.language_model.layers

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        return getattr(self.language_model, "cast_predicate", _everything)

    def make_cache(self) -> list[Any]:
        make = getattr(self.language_model, "make_cache", None)
        return [KVCache() for _ in self.layers] if make is None else [_cache(c) for c in make()]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        named = self._sanitize(self, weights)
        return {k: v for k, v in named.items() if k.startswith("language_model.")}


class _NoTower:
    """In place of the towers that mlx-vlm's `sanitize` passes tensors to."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        del weights
        return {}


def _everything(_path: str) -> bool:
    return True


def _cache(theirs: Any) -> Any:
    """mlx-lm's cache of the same kind. Raises TypeError for a kind that it lacks."""
    match type(theirs).__name__:
        case "KVCache":
            return KVCache()
        case "RotatingKVCache":
            return RotatingKVCache(theirs.max_size, theirs.keep)
        case name:
            raise TypeError(f"caches of the kind {name} are not used here")
