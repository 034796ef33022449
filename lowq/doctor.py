"""What `Lowq.examine` returns: findings, and the codes that they have."""

from lowq.operate.doctor import CODES
from lowq.operate.findings import KINDS, Finding, Severity

__all__ = ["CODES", "KINDS", "Finding", "Severity"]
