"""Ways to a function, as one program each: `ways.py WAY FOLDER`. Prints what it found as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable

RTLD_DEEPBIND = 8
FOLDER = sys.argv[2]


def load(name: str, mode: int = os.RTLD_NOW) -> ctypes.CDLL:
    return ctypes.CDLL(f"{FOLDER}/{name}", mode=mode)


def launch(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 8)(address)(1, 2, 3, 4, 5, 6, 7, 8))


def two_runtimes() -> object:
    """Each library gets the version that it was linked with, by symbol and by dlsym."""
    first, second = load("libcaller12.so"), load("libcaller13.so")
    mark = ctypes.c_uint64()
    found = [first.caller12(), second.caller13(), first.caller12(), second.caller13()]
    for name in ("libcudart.so.12", "libcudart.so.13"):
        load(name).cudaMalloc(ctypes.byref(mark), ctypes.c_uint64(1))
        found.append(mark.value)
    return found


def deepbind() -> object:
    """A library that finds its own dependencies first; the look-up of its function is when it is noticed."""
    caller = load("libcaller12.so", os.RTLD_NOW | RTLD_DEEPBIND)
    return [caller.caller12() for _ in range(3)]


def deepbind_lazy() -> object:
    """The same with lazy binding."""
    caller = load("libcaller12.so", os.RTLD_LAZY | RTLD_DEEPBIND)
    return [caller.caller12() for _ in range(3)]


def proc_address() -> object:
    """The driver's own look-up: exported (flags 0) and hidden (flags 1) addresses, and a name nobody has."""
    cuda = load("libcuda.so.1")
    results = []
    for symbol, flags in ((b"cuLaunchKernel", 0), (b"cuLaunchKernel", 1), (b"cuNothing", 0)):
        address, status = ctypes.c_void_p(), ctypes.c_int()
        result = cuda.cuGetProcAddress_v2(
            symbol, ctypes.byref(address), 12000, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        results.append([result, bool(address.value)])
        if address.value:
            launch(address.value)
    return results


def names() -> object:
    """What is not ours is found as ever."""
    libc = ctypes.CDLL(None)
    missing = []
    for library, name in ((libc, "no_such_function"), (load("libcudart.so.12"), "cudaNoSuchFunction")):
        try:
            getattr(library, name)
        except AttributeError as error:
            missing.append(name in str(error))
    return [libc.getpid() == os.getpid(), missing]


def versions() -> object:
    """dlvsym: a version that is there, one that is not, and a name that is not ours."""
    libc = ctypes.CDLL(None)
    libc.dlvsym.restype, libc.dlvsym.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    runtime = ctypes.CDLL(f"{FOLDER}/versioned.so")
    found = [libc.dlvsym(runtime._handle, b"cudaLaunchKernel", version) for version in (b"V1", b"V2")]
    assert found[0]
    launch(found[0])
    return [bool(found[1]), bool(libc.dlvsym(libc._handle, b"getpid", b"GLIBC_2.2.5"))]


def children() -> object:
    """Programs started without our entry: by exec functions with an empty environment."""
    program = [f"{FOLDER}/program", "calls", "10"]
    os.environ.clear()
    codes = [subprocess.run(program, env={}, stdout=subprocess.DEVNULL).returncode]
    codes.append(subprocess.run(program, stdout=subprocess.DEVNULL, env={"LD_PRELOAD": "/nowhere/libother.so"},
                                stderr=subprocess.DEVNULL).returncode)  # fmt: skip
    quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
    codes.append(os.waitpid(os.posix_spawn(program[0], program, {}, file_actions=quiet), 0)[1])
    codes.append(os.waitpid(os.posix_spawnp(program[0], program, {}, file_actions=quiet), 0)[1])
    for way in (lambda: os.execv(program[0], program), lambda: os.execve(program[0], program, {}),
                lambda: os.execvp(program[0], program), lambda: os.execvpe(program[0], program, {})):  # fmt: skip
        child = os.fork()
        if not child:
            os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
            way()
        codes.append(os.waitpid(child, 0)[1])
    codes.append(subprocess.run(program, env={"STALLSCOPE_SHIM": "off"}, stdout=subprocess.DEVNULL).returncode)
    return codes


WAYS: dict[str, Callable[[], object]] = {f.__name__: f for f in (two_runtimes, deepbind, deepbind_lazy, proc_address,
                                                                names, versions, children)}  # fmt: skip
print(json.dumps({"found": WAYS[sys.argv[1]]()}))
