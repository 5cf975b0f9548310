"""System calls by number: those that can block or take long. The numbers are the kernel's own (asm/unistd_64.h for
x86-64, asm-generic/unistd.h for aarch64) and never change."""

from __future__ import annotations

import platform

__all__ = ["TAKES_FD", "TAKES_PATH", "syscall_name"]

# fmt: off
# name -> (x86-64, aarch64), None where there is none. Of these the first argument is a file descriptor.
_ON_FILES: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84), "syncfs": (306, 267),
    "fallocate": (285, 47), "ftruncate": (77, 46), "flock": (73, 32), "fcntl": (72, 25), "ioctl": (16, 29),
    "sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    "copy_file_range": (326, 285), "getdents64": (217, 61), "fstat": (5, 80), "lseek": (8, 62), "close": (3, 57),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "recvmmsg": (299, 243), "sendto": (44, 206), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "accept": (43, 202), "accept4": (288, 242), "connect": (42, 203), "shutdown": (48, 210),
}
_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "futex": (202, 98), "futex_waitv": (449, 449), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "pause": (34, None),
    "wait4": (61, 260), "waitid": (247, 95), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "semop": (65, 193), "semtimedop": (220, 192), "msgrcv": (70, 188), "msgsnd": (69, 189),
    "mq_timedreceive": (243, 183), "mq_timedsend": (242, 182), "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "truncate": (76, 45), "mount": (165, 40), "umount2": (166, 39),
    "sync": (162, 81), "msync": (26, 227), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "madvise": (28, 233), "brk": (12, 214), "mlock": (149, 228), "mlockall": (151, 230),
    "munlock": (150, 229), "getrandom": (318, 278), "sched_yield": (24, 124), "clone": (56, 220),
    "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "io_uring_enter": (426, 426),
    "exit_group": (231, 94), "restart_syscall": (219, 128),
}
# fmt: on
TAKES_FD = frozenset(_ON_FILES)
# Which argument is the address of a path: of those that may wait for a file system, or for the other end of a fifo.
TAKES_PATH = {"open": 0, "openat": 1, "openat2": 1, "stat": 0, "lstat": 0, "newfstatat": 1, "statx": 1, "access": 0,
              "faccessat": 1, "faccessat2": 1, "execve": 0}  # fmt: skip


def _by_number(machine: str) -> dict[int, str]:
    column = {"x86_64": 0, "aarch64": 1}.get(machine)
    if column is None:
        return {}
    known = ((numbers[column], name) for name, numbers in {**_ON_FILES, **_OTHERS}.items())
    return {number: name for number, name in known if number is not None}


_NAMES = _by_number(platform.machine())


def syscall_name(number: int) -> str:
    """E.g. "futex"; "syscall 999" for one that is not in the table."""
    return _NAMES.get(number) or f"syscall {number}"
