"""Writes the Python modules of `peer.proto` beside it: `python proto/generate.py [OUT]`."""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
OUTPUTS = ("--python_out=", "--mypy_out=", "--grpc_python_out=", "--mypy_grpc_out=only_async:")


def generate(out: Path) -> None:
    """Runs protoc with a virtual path, so that modules register under `exo_node/proto`."""
    with tempfile.TemporaryDirectory() as scratch:
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-Iexo_node/proto={HERE}"]
        # Named by path: the environment's folder of scripts need not be on PATH.
        plugins = [f"--plugin={BIN / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        outputs = [option + scratch for option in OUTPUTS]
        subprocess.run([*protoc, *plugins, *outputs, "exo_node/proto/peer.proto"], check=True)
        for file in Path(scratch, "exo_node/proto").iterdir():
            # One module must not be known under two names: the folders import relatively.
            text = file.read_text().replace("from exo_node.proto import", "from . import")
            _ = (out / file.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
