"""What `Lowq.examine` returns: findings, and the codes that they have."""

from lowq.operate.findings import Finding, Severity, read_kinds

#: What there is to say of each kind of finding, by code, or by ``code.variant``.
KINDS = read_kinds()
#: The codes that findings have.
CODES = frozenset(name.partition(".")[0] for name in KINDS)

__all__ = ["CODES", "KINDS", "Finding", "Severity"]
