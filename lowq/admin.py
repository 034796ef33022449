"""The values that the acting methods of handles and applications return."""

from lowq.operate.actions import Acted, Moments
from lowq.operate.audit import AuditEntry
from lowq.operate.bulk import Step
from lowq.operate.layout_switch import ReshardProgress

__all__ = ["Acted", "AuditEntry", "Moments", "ReshardProgress", "Step"]
