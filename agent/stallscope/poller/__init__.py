"""The poller: a process without privileges that asks NVML and NCCL's RAS, both of which may hang, lie or be missing.

It imports only `wire` and `errors`. What it says reaches the aggregate process by way of `capture/forward.py`.
"""
