"""Whether sharper proposals would be accepted more often than draws at a request's temperature.

Reads pages of Python's manual with the target and its draft head, and computes from both
distributions the expected acceptance of a first draft: the sum of min(p, q) if it is drawn from q,
p(x) if it is the head's likeliest token x. Nothing is sampled, so the figures have no noise but
the text's. `python bench/proposals.py [FOLDER]`; the demo model without one.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final, cast

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from engines import DEMO, load_quietly, spec

from exo_node.mtp.sampling import Noise, TargetDistribution
from exo_node.mtp.seams import as_row
from exo_node.mtp.types import Sampling
from exo_node.shard.tools.verify.subject import ModelUnderTest, subject_of

PAGES: Final = 5
ROWS: Final = 256
"""Tokens of a page."""
SKIPPED: Final = 4
"""First rows, which have hardly any context."""
LIKELIEST: Final = 0.0
SCALES: Final = (1.15, 1.0, 0.7, 0.5, 0.3, LIKELIEST)
"""Temperatures of the draws, relative to the request's; LIKELIEST: the head's likeliest token."""
SAMPLINGS: Final = (
    Sampling(temperature=0.3),
    Sampling(temperature=0.6),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.95, top_k=20),
    Sampling(temperature=0.7, top_p=0.8, top_k=20),
)


def rows_of(subject: ModelUnderTest, ids: list[int], noise: float) -> tuple[mx.array, mx.array]:
    """Logits of target and head for the same tokens, (n, V) each."""
    model = subject.draft_model
    assert model is not None, subject.no_drafts
    block = subject.target.forward(as_row(ids), subject.make_caches(), want="all")
    assert block.hidden is not None
    hidden = block.hidden[:, :-1]
    scale = noise * mx.sqrt(mx.square(hidden).mean())
    hidden += scale * mx.random.normal(hidden.shape, hidden.dtype, key=mx.random.key(1))
    out = model.head(hidden, model.embed(as_row(ids[1:])[None]), model.make_cache())
    target = block.logits.reshape(len(ids), -1)[1 + SKIPPED : -1]
    return target, model.logits(out)[0][SKIPPED:-1]


def accepted(p: mx.array, log_q: mx.array, head: mx.array, scale: float) -> float:
    """Expected number of accepted first drafts, over rows of both distributions (n, V)."""
    if scale == LIKELIEST:
        return number(mx.take_along_axis(p, head.argmax(-1, keepdims=True), axis=-1).sum())
    # A filter's -inf stays one at any scale.
    return number(mx.minimum(p, mx.softmax(log_q / scale, axis=-1)).sum())


def number(value: mx.array) -> float:
    return cast("float", value.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _ = parser.add_argument("folder", nargs="?", type=Path, default=DEMO)
    _ = parser.add_argument(
        "--noise", type=float, default=0.0, help="of the head's input, relative"
    )
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    loaded = load_quietly(spec(args.folder, 0, layers, num_layers=layers, native_mtp=True))
    assert loaded.codec is not None
    subject = subject_of(loaded, mx.float32, ROWS, 1)
    long = sorted(text for text in topics.values() if len(text) > 6 * ROWS)
    texts = [" ".join(text.split())[: 6 * ROWS] for text in long[:: len(long) // PAGES][:PAGES]]
    pages = [rows_of(subject, loaded.codec.encode_text(t)[:ROWS], args.noise) for t in texts]
    count = sum(p.shape[0] for p, _ in pages)
    same = sum(number((p.argmax(-1) == q.argmax(-1)).sum()) for p, q in pages)
    print(f"{count} rows; the head names the target's likeliest token in {same / count:.3f}")
    for sampling in SAMPLINGS:
        distribution = TargetDistribution(sampling, Noise(0))
        sums, best = dict.fromkeys(SCALES, 0.0), Counter[float]()
        for target, head in pages:
            p, log_q = (distribution.log_probabilities(each, 0) for each in (target, head))
            page = {scale: accepted(mx.exp(p), log_q, head, scale) for scale in SCALES}
            best[max(page, key=page.__getitem__)] += 1
            sums = {scale: sums[scale] + page[scale] for scale in SCALES}
        shares = ", ".join(f"{scale:g}: {each / count:.3f}" for scale, each in sums.items())
        s = sampling
        print(f"{s.temperature:g}, top_p {s.top_p:g}, top_k {s.top_k}: {shares}; {dict(best)}")


if __name__ == "__main__":
    main()
