"""Checks of attention and of models, ours and others. They import torch alone: models are given to them as objects."""

from minitx.check.calls import check_attention
from minitx.check.mutants import mutant
from minitx.check.results import Check, Finding, Report, Severity, Status

__all__ = ["Check", "Finding", "Report", "Severity", "Status", "check_attention", "mutant"]
