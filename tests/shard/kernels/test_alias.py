"""Eight bytes with the hash of others, as libstdc++ hashes strings."""

import random
import subprocess
from pathlib import Path

import pytest
from emulated import compiler

from exo_node.shard.kernels.cuda import alias_of, hash_of

PROGRAM = """
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    std::ifstream file(names[i], std::ios::binary);
    std::cout << std::hash<std::string>{}({std::istreambuf_iterator<char>(file), {}}) << " ";
  }
}
"""


@pytest.mark.skipif(compiler() is None, reason="there is no g++ here to ask for std::hash")
def test_an_alias_has_the_hash_that_libstdcxx_gives_the_code(tmp_path: Path) -> None:
    _ = (tmp_path / "hash.cpp").write_text(PROGRAM)
    subprocess.run(["g++", "-o", "hash", "hash.cpp"], cwd=tmp_path, check=True)
    chance = random.Random(1)
    for size in (0, 3, 8, 21, 18592):
        code = chance.randbytes(size)
        alias = alias_of(code)
        assert len(alias) == 8 and (alias != code or size == 8)
        for name, content in (("code", code), ("alias", alias)):
            _ = (tmp_path / name).write_bytes(content)
        process = subprocess.run(
            [str(tmp_path / "hash"), "code", "alias"], cwd=tmp_path, capture_output=True, check=True
        )
        assert [int(each) for each in process.stdout.split()] == [hash_of(code)] * 2
