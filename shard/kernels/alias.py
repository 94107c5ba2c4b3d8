"""Eight bytes that MLX takes for a kernel's code once it has loaded it.

MLX finds a loaded module by its name and `std::hash` of its code, and at each launch it copies the
code, hashes it and throws it away: ten microseconds for code of 20 KB. libstdc++'s hash, a
MurmurHash64A, can be inverted, so eight other bytes have the hash of that code. Whether MLX was
built with that hash is tried on each kernel, by `cuda.py`.
"""

from typing import Final

_WORD: Final = 2**64 - 1
_FACTOR: Final = 0xC6A4A7935BD1E995
_INVERSE: Final = pow(_FACTOR, -1, 2**64)
_SEED: Final = 0xC70F6907


def alias_of(code: bytes) -> bytes:
    """The only eight bytes with the hash of `code`."""
    mixed = _mixed(_mixed(hash_of(code)) * _INVERSE & _WORD)
    data = (mixed * _INVERSE & _WORD) ^ _SEED ^ (8 * _FACTOR & _WORD)
    return (_mixed(data * _INVERSE & _WORD) * _INVERSE & _WORD).to_bytes(8, "little")


def hash_of(code: bytes) -> int:
    """libstdc++'s `std::hash` of a string on a machine of 64 bits."""
    hashed = _SEED ^ (len(code) * _FACTOR & _WORD)
    whole = len(code) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(code[at : at + 8], "little")
        data = _mixed(word * _FACTOR & _WORD) * _FACTOR & _WORD
        hashed = (hashed ^ data) * _FACTOR & _WORD
    if rest := code[whole:]:
        hashed = (hashed ^ int.from_bytes(rest, "little")) * _FACTOR & _WORD
    return _mixed(_mixed(hashed) * _FACTOR & _WORD)


def _mixed(word: int) -> int:
    """Its own inverse, since it shifts by more than half a word."""
    return word ^ word >> 47
