"""Looking at attention without changing the answer."""

from minitx.analysis.capture import capture
from minitx.analysis.snapshot import AttentionMap, Snapshot, read_snapshots, take_snapshot
from minitx.analysis.statistics import attention_statistics, favourite_keys, zhai_entropy_bound

__all__ = [
    "AttentionMap",
    "Snapshot",
    "attention_statistics",
    "capture",
    "favourite_keys",
    "read_snapshots",
    "take_snapshot",
    "zhai_entropy_bound",
]
