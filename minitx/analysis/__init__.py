"""Looking at attention without changing the answer."""

from minitx.analysis.capture import capture
from minitx.analysis.snapshot import AttentionMap, Snapshot, read_snapshots, take_snapshot
from minitx.analysis.statistics import attention_statistics, zhai_entropy_bound

__all__ = [
    "AttentionMap",
    "Snapshot",
    "attention_statistics",
    "capture",
    "read_snapshots",
    "take_snapshot",
    "zhai_entropy_bound",
]
