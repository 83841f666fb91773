"""Looking at attention without changing the answer."""

from minitx.analysis.capture import capture
from minitx.analysis.statistics import attention_statistics, favourite_keys, zhai_entropy_bound

__all__ = ["attention_statistics", "capture", "favourite_keys", "zhai_entropy_bound"]
