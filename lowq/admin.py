"""What people do: the values that handles and the application return to those who act."""

from lowq.operate.actions import Acted
from lowq.operate.audit import AuditEntry
from lowq.operate.bulk import Step
from lowq.operate.reshard import ReshardProgress

__all__ = ["Acted", "AuditEntry", "ReshardProgress", "Step"]
