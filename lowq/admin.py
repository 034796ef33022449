"""What people do: the values that handles and the application return to those who act."""

from lowq.operate.actions import Acted, Moments
from lowq.operate.audit import AuditEntry
from lowq.operate.bulk import Step
from lowq.operate.layout_switch import ReshardProgress

__all__ = ["Acted", "AuditEntry", "Moments", "ReshardProgress", "Step"]
