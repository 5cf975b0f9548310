"""What the programs of one rank share; each runs in the torch venv."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.backends.cudnn.enabled = False


def join(timeout_s: float = 60) -> None:
    """The default group is `nccl`, on the rank's own device."""
    torch.cuda.set_device(RANK)
    dist.init_process_group(
        "nccl",
        init_method=os.environ["RENDEZVOUS"],
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", RANK),
    )


def say(**words: Any) -> None:
    """What the test reads."""
    Path(sys.argv[1]).write_text(json.dumps(words))
