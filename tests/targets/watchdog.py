"""watchdog [BLOCK_S [END_S]]: what torch does beside a wait: one thread waits, the other asks for an event all the time.

Prints "ready", waits for a line, and blocks a thread in cudaStreamSynchronize for BLOCK_S seconds while it records and
queries events; goes on with that for END_S seconds. Ends with JSON: when it called cudaEventQuery, and what came back.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time

PERIOD_S = 0.01
block_s, end_s = (float(word) for word in (*sys.argv[1:], "3", "1")[:2])
cudart = ctypes.CDLL(os.path.join(os.environ["STALLSCOPE_SIM_LIB"], "libcudart.so.12"))
stream, event = ctypes.c_void_p(), ctypes.c_void_p()
cudart.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
cudart.cudaEventCreate(ctypes.byref(event))
print("ready", flush=True)
sys.stdin.readline()


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


one = Dim3(1, 1, 1)
cudart.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(int(block_s * 1e9)))
cudart.cudaLaunchKernel(ctypes.c_void_p(0x1000), one, one, None, ctypes.c_size_t(0), stream)
begun_ns = time.monotonic_ns()
waiter = threading.Thread(target=cudart.cudaStreamSynchronize, args=(stream,))
waiter.start()
asked: list[int] = []
results: list[int] = []
end = time.monotonic() + block_s + end_s
while time.monotonic() < end:
    cudart.cudaEventRecord(event, stream)
    asked.append(time.monotonic_ns())
    results.append(cudart.cudaEventQuery(event))
    time.sleep(PERIOD_S)
waiter.join()
print(json.dumps({"pid": os.getpid(), "begun_ns": begun_ns, "asked": asked, "results": results}))
