"""What is used of mlx-vlm, of which single modules are imported: names, signatures, attributes.

Another version may change them without a word. It may be installed within the extra's range, so the
range ends with the minor version, and a newer one is let in when this was read again.
"""

import inspect
import json
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import qwen4
from mlx.utils import tree_flatten

from exo_node.shard.model.open_model import model_classes
from exo_node.shard.text.bare_packages import bare_package

ROOT = Path(__file__).parents[3]
READ = "0.7.10"
SIGNATURES = {
    "qwen3_vl.config:VisionConfig.from_dict": "params",
    "qwen3_vl.vision:VisionModel": "config",
    "qwen3_vl.vision:VisionModel.__call__": "self hidden_states grid_thw",
    "qwen3_vl.vision:VisionModel.sanitize": "self weights",
    "gemma3.config:VisionConfig.from_dict": "params",
    "gemma3.vision:VisionModel": "config",
    "gemma3.vision:VisionModel.sanitize": "self weights",
    "pixtral.config:VisionConfig.from_dict": "params",
    "pixtral.vision:VisionModel": "config",
    "pixtral.vision:VisionModel.sanitize": "self weights",
    "pixtral.vision:apply_rotary_pos_emb": "q k cos sin unsqueeze_dim",
    "bert.bert:Model": "config",
    "bert.bert:scaled_dot_product_attention": "",
    "bert.config:ModelConfig.from_dict": "params",
    "modernbert.modernbert:Model": "config",
    "modernbert.modernbert:scaled_dot_product_attention": "",
    "modernbert.config:ModelConfig.from_dict": "params",
    "xlm_roberta.xlm_roberta:Model": "config",
    "xlm_roberta.xlm_roberta:scaled_dot_product_attention": "",
    "xlm_roberta.config:ModelConfig.from_dict": "params",
    "qwen4_exp.config:TextConfig.from_dict": "params",
    "qwen4_exp.language:LanguageModel": "args config",
    "qwen4_exp.language:Qwen4ExpDecoderLayer": "config layer_idx",
    "qwen4_exp.language:Qwen4ExpAttention": "config",
    "qwen4_exp.language:Qwen4ExpAttention._prepare_projected_qkv": (
        "self q_proj_output keys values cache position_ids position_embeddings mask"
    ),
    "qwen4_exp.language:Qwen4ExpQSAIndexer._apply_rope": "self x position_ids",
    "qwen4_exp.language:Qwen4ExpGatedDeltaNet": "config",
    "qwen4_exp.language:Qwen4ExpGatedDeltaNet._normalize_qk": "self q k",
    "qwen4_exp.language:Qwen4ExpGatedResidual": "config use_combine",
    "qwen4_exp.language:Qwen4ExpGatedResidual.__call__": "self hyper_input",
    "qwen4_exp.language:Qwen4ExpRMSNorm": "dim group_size eps",
    "qwen4_exp.language:Qwen4ExpPLELayer.__call__": "self hidden_states input_ids cache mask",
    "qwen4_exp.language:ShardedEmbedding": "num_embeddings dims num_shards",
    "qwen4_exp.fp8:convert_qwen4_exp_fp8_weights": "weights",
    "cohere2_moe.language:LanguageModel": "args",
    "cohere2_moe.cohere2_moe:Model.sanitize": "self weights",
    "cohere2_moe.config:ModelConfig.from_dict": "params",
    "flint.language:LanguageModel": "args",
    "flint.flint:Model.sanitize": "self weights",
    "flint.config:ModelConfig.from_dict": "params",
    "k2_horizon.language:LanguageModel": "args",
    "k2_horizon.k2_horizon:Model.sanitize": "self weights",
    "k2_horizon.config:ModelConfig.from_dict": "params",
    "kolibri1.language:LanguageModel": "args",
    "kolibri1.kolibri1:Model.sanitize": "self weights",
    "kolibri1.config:ModelConfig.from_dict": "params",
    "step3p7.language:LanguageModel": "args config",
    "step3p7.step3p7:Model.sanitize": "self weights",
    "step3p7.config:ModelConfig.from_dict": "params",
    "step3p7.config:TextConfig.from_dict": "params",
    "cache:RotatingKVCache": "max_size keep",
    "switch_layers:SwitchGLU": "input_dims hidden_dims num_experts activation bias",
    "switch_layers:SwitchLinear": "input_dims output_dims num_experts bias",
}
"""Names of parameters; empty where only the name itself is used."""
IMPORTS = """
import json, sys
from exo_node.shard.model import loader_import
from exo_node.shard.model.open_model import model_classes
_ = model_classes({"model_type": "qwen4_exp"})
print(json.dumps(sorted(sys.modules)))
"""


def test_the_installed_version_is_the_one_that_was_read() -> None:
    assert version("mlx-vlm") == READ, "read the modules again, then change READ and the range"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "mlx-vlm>=0.7.10,<0.8" in project["optional-dependencies"]["vision"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_used_name_takes_what_is_given(name: str) -> None:
    module, _, path = name.partition(":")
    package = module.partition(".")[0]
    _ = model_classes({"model_type": "qwen4_exp"})  # the packages that its modules are in
    if package not in ("switch_layers", "cache"):
        bare_package(f"mlx_vlm.models.{package}")
    found: Any = import_module(f"mlx_vlm.models.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    parameters = " ".join(inspect.signature(found).parameters).removesuffix(" kwargs")
    assert not SIGNATURES[name] or parameters == SIGNATURES[name]


def test_the_parts_of_qwen4_exp_have_the_used_attributes() -> None:
    model = qwen4.theirs(qwen4.config_of())
    recurrent, attending = model.layers[1], model.layers[2]
    assert recurrent.is_linear and not attending.is_linear
    assert model.model.fa_idx == 2 and model.args.hc_count == 4
    table = recurrent.ple.ple_embedding.ngram_embedding
    assert sum(table.shard_sizes) == table.shard_offsets[-1] and table.dims == 32
    indexer = attending.self_attn.indexer
    assert (indexer.n_heads, indexer.head_dim) == (2, 32)
    assert (indexer.compress_ratio, indexer.block_topk) == (4, qwen4.BUDGET // 4)
    names = {name.rpartition(".")[0] for name, _ in tree_flatten(recurrent.parameters())}
    parts = "conv1d in_proj_a in_proj_b in_proj_qkv in_proj_z norm out_proj"
    assert {f"linear_attn.{part}" for part in parts.split()} <= names


def test_its_import_neither_reads_mlx_vlms_trainer_nor_patches_transformers() -> None:
    output = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, check=True, text=True, timeout=120
    ).stdout
    names = set(json.loads(output.splitlines()[-1]))
    assert "mlx_vlm.models.qwen4_exp.language" in names
    heavy = (
        "mlx_vlm.trainer",
        "mlx_vlm.utils",
        "mlx_vlm.speculative.drafters",
        "transformers.utils",
    )
    assert not names.intersection(heavy)
