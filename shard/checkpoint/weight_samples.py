"""A digest of samples of a model's weights, by which two machines compare what they have loaded."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from .checkpoint import read_checkpoint
from .headers import Tensor

SAMPLE_BYTES: Final = 512


def sample_digest(folder: Path) -> str:
    """SHA-256, in hex, of the fingerprint of a checkpoint, and of some bytes from the middle of
    each tensor.

    Training changes nearly every number of a tensor, so weights of another training differ, though
    their headers are alike. Reading all of them would take minutes. Raises OSError and
    InvalidCheckpoint.
    """
    checkpoint = read_checkpoint(folder)
    digest = hashlib.sha256(checkpoint.fingerprint.encode())
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.file, tensor.start))
    for file, members in groupby(tensors, key=lambda tensor: tensor.file):
        for sample in _samples(folder / file, members):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path, tensors: Iterable[Tensor]) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tensor in tensors:
            size = min(SAMPLE_BYTES, tensor.nbytes)
            middle = tensor.start + (tensor.nbytes - size) // 2
            yield os.pread(descriptor, size, middle)
    finally:
        os.close(descriptor)
