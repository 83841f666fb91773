"""What a check may find, in the sentences of ``findings.toml``: the severity, the mistake, the advice, and where the mistake shows.

>>> finding("few-axes", few="(L, D)", many="(B, H, L, D)", also="").fault
'checked with (L, D): with (B, H, L, D), it runs and gives another result'
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from minitx.check.results import NOTE, Finding, Severity

FINDINGS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The findings by their ids. Without a severity, a finding depends on the declaration."""


def finding(key: str, severity: Severity | None = None, **words: Any) -> Finding:
    """Return the finding ``key`` of ``findings.toml``, with ``words`` in its id and its sentences."""
    sentences = {name: sentence.format(**words) for name, sentence in FINDINGS[key].items()}
    usual = sentences.pop("severity", severity or NOTE)
    return Finding(key.format(**words), Severity(usual), **sentences)
