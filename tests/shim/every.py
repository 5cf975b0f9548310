"""Calls every function of the hook table through both kinds of wrappers: `every.py FOLDER`; prints what did not arrive.

Argument i is 0x1000 + i, except pointers that are followed. The stub libraries keep what they got.
"""

from __future__ import annotations

import ctypes
import json
import sys

FOLDER, TABLE = sys.argv[1], json.loads(sys.argv[2])  # [[library, name, words]]
U64 = ctypes.c_uint64
CONFIG = (ctypes.c_uint32 * 16)(1, 2, 3, 4, 5, 6, 7, 0, 0x5678)  # grid, block, shared memory, stream
OUT, UID = U64(), (ctypes.c_uint8 * 128)(*range(1, 129))


class Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * 128),)


def arguments(words: list[str]) -> list[object]:
    pointers = {"*config": CONFIG, "*newcomm": OUT, "*uid": UID, "*uid_out": UID}
    values: list[object] = []
    for i, word in enumerate(w for w in words if w != "uid[128]"):
        values.append(U64(ctypes.addressof(pointers[word]) if word in pointers else 0x1000 + i))
    if "uid[128]" in words:
        values.insert(2, Id.from_buffer_copy(bytes(range(1, 129))))
    return values


wrong = []
everywhere = ctypes.CDLL(None)
for library, name, words in TABLE:
    stub = ctypes.CDLL(f"{FOLDER}/{library}", mode=ctypes.RTLD_GLOBAL)
    got, given = (U64 * 12).in_dll(stub, "got"), arguments(words)
    expected = [v.value for v in given if isinstance(v, U64)]
    for place in (everywhere, stub):  # by the exported name, and by the address that dlsym gives
        ctypes.memset(got, 0, 96)
        result = getattr(place, name)(*given)
        if result != 0 or list(got)[: len(expected)] != expected:
            wrong.append([name, result, list(got)[: len(expected)], expected])
print(json.dumps({"wrong": wrong}))
