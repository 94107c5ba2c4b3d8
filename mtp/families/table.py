"""The family of a loaded model: the table of classes."""

from mlx import nn

from ..caches.rollback import swap_classes
from .family import Family
from .head import HiddenKind


def family_of(model: nn.Module, hidden_kind: HiddenKind | None = None) -> Family | None:
    """The family of a loaded model, or None if there is no file for it.

    `hidden_kind`: the head's input, one of the family's `hidden_kinds`, or None.
    """
    family_class = _class_for(model)
    return None if family_class is None else family_class(model, hidden_kind)


def prepare(model: nn.Module) -> None:
    """Replaces layer classes of a loaded model so that its rows can be rolled back, and so that a
    verify computes the same bits as single rows."""
    if (family_class := _class_for(model)) is not None:
        swap_classes(model, family_class.swaps)


def _class_for(model: nn.Module) -> type[Family] | None:
    """The class for a module of mlx-lm, which has over a hundred, or of this package: one is
    imported only for a model of its family."""
    match type(model).__module__.removeprefix("mlx_lm.models.").removeprefix(f"{__package__}."):
        case "qwen3_5" | "qwen3_5_moe":
            from .qwen35 import Qwen35Family as family_class
        case "qwen3_next":
            from .qwen3_next import Qwen3NextFamily as family_class
        case "deepseek_v3":
            from mlx_lm.models.deepseek_v3 import DeepseekV3Attention

            from .latent_attention import latent_family

            return latent_family(DeepseekV3Attention)
        case "deepseek_v32" | "glm_moe_dsa":
            from .deepseek_v32 import DeepseekV32Family as family_class
        case "glm4_moe":
            from .nextn import NextnFamily as family_class
        case "glm4_moe_lite":
            from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteAttention

            from .latent_attention import latent_family

            return latent_family(Glm4MoeLiteAttention)
        case "ernie4_5" | "ernie4_5_moe":
            from .ernie import ErnieFamily as family_class
        case "longcat_flash":
            from .longcat import LongcatFamily as family_class
        case "mimo":
            from .mimo import MimoFamily as family_class
        case "mimo_v2_flash":
            from .mimo_v2 import MimoV2Family as family_class
        case "step3p5":
            from .step3p5 import StepFamily as family_class
        case "nemotron_h":
            from .nemotron_h import NemotronFamily as family_class
        case "qwen4_exp":
            from .qwen4_exp import StreamsFamily as family_class
        case _:
            return None
    return family_class
