"""Eight bytes that MLX takes for a kernel's code once it has loaded it.

MLX finds a loaded module by its name and `std::hash` of its code, and at each launch it copies the
code, hashes it and throws it away: ten microseconds for code of 20 KB. libstdc++'s hash, a
MurmurHash64A, can be inverted, so eight other bytes have the hash of that code. `cuda.py` tests
with each kernel whether MLX was built with that hash.
"""

from typing import Final

_WORD: Final = 2**64 - 1
_FACTOR: Final = 0xC6A4A7935BD1E995
_INVERSE: Final = pow(_FACTOR, -1, 2**64)
_SEED: Final = 0xC70F6907


def alias_of(code: bytes) -> bytes:
    """The only eight bytes with the hash of `code`."""
    word = _mix(_mix(hash_of(code)) * _INVERSE & _WORD)
    block = (word * _INVERSE & _WORD) ^ _SEED ^ (8 * _FACTOR & _WORD)
    return (_mix(block * _INVERSE & _WORD) * _INVERSE & _WORD).to_bytes(8, "little")


def hash_of(code: bytes) -> int:
    """libstdc++'s `std::hash` of a string on a machine of 64 bits."""
    value = _SEED ^ (len(code) * _FACTOR & _WORD)
    whole = len(code) & ~7
    for start in range(0, whole, 8):
        word = int.from_bytes(code[start : start + 8], "little")
        data = _mix(word * _FACTOR & _WORD) * _FACTOR & _WORD
        value = (value ^ data) * _FACTOR & _WORD
    if rest := code[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * _FACTOR & _WORD
    return _mix(_mix(value) * _FACTOR & _WORD)


def _mix(word: int) -> int:
    """The mixing step of MurmurHash64A. It is its own inverse: it shifts by over half a word."""
    return word ^ word >> 47
