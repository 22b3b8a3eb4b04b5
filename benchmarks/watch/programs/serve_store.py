"""A process that only serves the store, for ranks that srun started: `python serve_store.py PORT`."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore(
    "0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
)
threading.Event().wait()
