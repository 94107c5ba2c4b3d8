"""transformers without its `__init__`: the tokenizers are the same, and nothing is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from engines import DEMO

CLASSES = ("Qwen2Tokenizer", "LlamaTokenizer", "TokenizersBackend", "PreTrainedTokenizerFast", "No")

TOKENIZERS = """
import json, sys
from pathlib import Path
{first}
from exo_node.shard.text.codec import TextCodec
found, kinds = [], []
for folder in sys.argv[1:]:
    codec = TextCodec.load(Path(folder))
    ids = codec.encode_chat([{{"role": "user", "content": "Grüße, 世界 <|im_end|>"}}])
    inner = codec._tokenizer._tokenizer
    classes = [f"{{each.__module__}}.{{each.__name__}}" for each in type(inner).__mro__]
    found.append([classes, ids, codec.decode(ids), sorted(codec.end_tokens), codec.longest_token])
    kinds.append(type(sys.modules["transformers"]).__name__)
print(json.dumps([found, kinds[0]]))
"""
USUAL = """
from exo_node.shard.text.bare_packages import bare_package
bare_package("mlx_lm")
"""
BARE = f"""
{USUAL}
from exo_node.shard.text.bare_packages import bare_transformers
bare_transformers()
"""


def test_every_class_of_tokenizer_is_the_same_without_the_whole_of_transformers(
    tmp_path: Path,
) -> None:
    folders = [str(DEMO), *(str(_with_class(tmp_path / name, name)) for name in CLASSES)]
    bare, root = json.loads(_output(TOKENIZERS.format(first=BARE), *folders))
    usual, _ = json.loads(_output(TOKENIZERS.format(first=USUAL), *folders))
    assert bare == usual
    assert (len(bare), root) == (len(folders), "_BarePackage")


NAMES = """
import sys
from exo_node.shard.text.bare_packages import bare_transformers
bare_transformers()
import transformers
from transformers import AutoTokenizer as auto, PreTrainedTokenizerFast as fast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as before
print(transformers.__version__ == __import__("importlib.metadata").metadata.version("transformers"))
for name in ("__wrapped__", "no_such_name"):
    print(hasattr(transformers, name), type(sys.modules["transformers"]) is type(transformers))
from transformers import GenerationConfig, PreTrainedTokenizerBase
whole = sys.modules["transformers"]
print(whole is not transformers, whole.AutoTokenizer is auto, whole.PreTrainedTokenizerFast is fast)
print(PreTrainedTokenizerBase is before, transformers.GenerationConfig is GenerationConfig)
print(transformers.models.llama.LlamaConfig is transformers.LlamaConfig)
"""


def test_any_other_name_is_that_of_the_whole_which_is_imported_then() -> None:
    lines = _output(NAMES).splitlines()
    assert lines == ["True", "False True", "False False", "True True True", "True True", "True"]


ELSEWHERE = """
import sys
from importlib.machinery import PathFinder
from exo_node.shard.text.bare_packages import bare_package
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [sys.argv[1]]) if name == "elsewhere" else None
sys.meta_path.append(Editable)
bare_package("elsewhere.models")
from elsewhere.models.one import NUMBER
print(NUMBER)
"""


def test_a_package_is_found_where_an_editable_install_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "models"
    folder.mkdir(parents=True)
    for each in (folder.parent, folder):
        _ = (each / "__init__.py").write_text("raise ImportError('it is not bare')")
    _ = (folder / "one.py").write_text("NUMBER = 1")
    assert _output(ELSEWHERE, str(tmp_path)) == "1\n"


def _with_class(folder: Path, name: str) -> Path:
    """The demo's tokenizer under another class's name."""
    _ = shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors", "recipe"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": name}
    _ = path.write_text(json.dumps(config))
    return folder


def _output(program: str, *arguments: str) -> str:
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
