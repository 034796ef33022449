"""Pages of the shop."""

from django.urls import path
from orders import views

urlpatterns = [
    path("orders", views.create),
    path("webhooks/payment", views.payment),
]
