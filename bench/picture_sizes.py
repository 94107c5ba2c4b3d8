"""Seconds of a picture's first and second encoding, by size: what a new size compiles.

    python bench/picture_sizes.py [--sizes 16x16,16x24,24x32,32x32,48x64] [--layers 27]

Sizes are patches by height and width, as the tower of Qwen3.5 takes them, with random weights. Each
is encoded three times; `first` waits for everything that is compiled or planned for it. `parts`
tells the same of the tower's parts: the convolution of the patches, the places of patches
(their table is interpolated), one layer's attention and the rest of it, what joins patches. `files`
are the kernels that MLX compiled for it, by its folder of PTX files. Run it once more to
see what the files save, and once with MLX_CUDA_USE_CUDNN_SDPA=0 to see what cuDNN's attention
plans.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from exo_node.shard.checkpoint.vision import Vision
from exo_node.shard.model.tower import _QwenTower  # pyright: ignore[reportPrivateUsage]
from exo_node.shard.text.image_rows import PreparedImage

TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 5120,
    "num_position_embeddings": 2304,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}
"""Qwen3.5's published vision_config."""
MEAN = (0.5, 0.5, 0.5)


def main() -> None:
    options = _options()
    tower = _tower(options.layers)
    folder = Path(os.environ.get("MLX_PTX_CACHE_DIR", "/nonexistent"))
    print(mx.default_device(), f"PTX files in {folder}: {len(_files(folder))}", flush=True)
    for height, width in options.sizes:
        before = _files(folder)
        parts = {name: _seconds(work) for name, work in _parts(tower, height, width).items()}
        work = partial(_encoded, tower, _image(height, width))
        whole = [_seconds(work) for _ in range(3)]
        print(
            json.dumps(
                {
                    "patches": [height, width],
                    "first": whole[0],
                    "then": whole[1:],
                    "parts": parts,
                    "files": sorted(_files(folder) - before),
                }
            ),
            flush=True,
        )


def _encoded(tower: Any, image: PreparedImage) -> mx.array:
    return tower.features(image).rows


def _parts(tower: Any, height: int, width: int) -> dict[str, Callable[[], mx.array]]:
    visual, count = tower.visual, height * width
    grid = mx.array([[1, height, width]])
    hidden = TOWER["hidden_size"]
    pixels = mx.random.normal((count, 3 * 2 * 16 * 16)).astype(mx.bfloat16)
    x = mx.random.normal((count, hidden)).astype(mx.bfloat16)
    lengths = mx.array([0, count], dtype=mx.int32)
    angles = visual.rot_pos_emb(grid)
    block = visual.blocks[0]
    mx.eval(pixels, x, angles)
    return {
        "convolution": lambda: visual.patch_embed(pixels),
        "places": lambda: visual.fast_pos_embed_interpolate(grid),
        "angles": lambda: visual.rot_pos_emb(grid),
        "attention": lambda: block.attn(x, cu_seqlens=lengths, rotary_pos_emb=angles),
        "rest of a layer": lambda: block.mlp(block.norm2(x)),
        "merger": lambda: visual.merger(x),
    }


def _tower(layers: int) -> Any:
    mx.random.seed(1)
    config = TOWER | {"depth": layers}
    tower = _QwenTower(Vision("qwen", config, 0, 2), {})
    tower.set_dtype(mx.bfloat16)
    mx.eval(tower.parameters())
    return tower


def _image(height: int, width: int) -> PreparedImage:
    pixels = random.Random(height * width).randbytes(height * width * 3 * 2 * 16 * 16)
    rows = height * width // 4
    return PreparedImage(rows, (1, height, width), b"", pixels, MEAN, MEAN)


def _seconds(work: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(work())
    mx.synchronize()
    return round(time.perf_counter() - start, 4)


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder))[:80] for file in folder.rglob("*.ptx")}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    sizes = ((16, 16), (16, 24), (24, 32), (32, 32), (32, 48), (48, 64))
    _ = add("--sizes", type=_pairs, default=sizes, help="patches: HEIGHTxWIDTH,…")
    _ = add("--layers", type=int, default=27)
    return parser.parse_args()


def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(side) for side in each.split("x")) for each in text.split(","))


if __name__ == "__main__":
    main()
