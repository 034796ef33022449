"""The dashboard as a page of Django's admin, and `LowqJobLink`, from an object to its job there.

The admin logs people in, and permissions say what they may do: staff with ``lowq.view`` may look, with ``lowq.act`` act
as well. Superusers have both.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, URLPattern, path, re_path, reverse
from django.utils.html import format_html

from lowq.contrib.django.dashboard import Role, answer
from lowq.contrib.django.models import Dashboard
from lowq.errors import ConfigError

__all__ = ["DashboardAdmin", "LowqJobLink"]

_NAME = "lowq_dashboard_changelist"


def _role_of(request: HttpRequest) -> Role | None:
    """What the user may do on the dashboard; None: not even look."""
    user: Any = request.user
    if user.has_perm("lowq.act"):
        return "admin"
    return "read" if user.has_perm("lowq.view") else None


class DashboardAdmin(admin.ModelAdmin):
    """The dashboard below ``lowq/dashboard/`` of an admin site, and its entry in the site's index."""

    def get_urls(self) -> list[URLPattern]:
        """All pages of the dashboard, in place of those of a model."""
        # It sends caching headers and checks where forms come from itself.
        view = self.admin_site.admin_view(_show, cacheable=True)
        return [path("", view, name=_NAME), re_path(r"^(?P<path>[\s\S]+)$", view)]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002  # Django's
        """Whether the user may look."""
        return _role_of(request) is not None

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Whether the index of the admin lists the dashboard."""
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002  # Django's
        """False: there are no rows."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002  # Django's
        """False: there are no rows."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002  # Django's
        """False: there are no rows."""
        return False


def _show(request: HttpRequest, path: str = "") -> HttpResponse:
    role = _role_of(request)
    if role is None:
        raise PermissionDenied
    return answer(request, path, request.user.get_username(), role)


_show.csrf_exempt = True  # type: ignore[attr-defined]  # the dashboard has a token of its own

if find_spec("starlette") is not None:  # as with the extra `web`
    admin.site.register(Dashboard, DashboardAdmin)


class LowqJobLink:
    """A link from an object to the page of its job, for ``readonly_fields`` or ``list_display`` of a ``ModelAdmin``::

        readonly_fields = [LowqJobLink(WarehouseSync)]

    ``queue``: a worker, a task, or the name of a queue. ``job_id``: the name of the field with the job's id, or a
    function of the object. ``label``: the title of the field. It asks Redis nothing, and all who see the object see the
    link: it is the dashboard that refuses users who may not look. Projects without the dashboard get the id alone.

    Raises:
        ConfigError: ``queue`` is something else.
    """

    def __init__(self, queue: Any, job_id: str | Callable[[Any], object] = "pk", *, label: str | None = None) -> None:
        name = queue if isinstance(queue, str) else getattr(queue, "queue_name", None)
        if not isinstance(name, str):
            raise ConfigError(
                f"LowqJobLink({queue!r:.60}): write a worker, a task or the name of a queue, LowqJobLink(OrderSync)"
            )
        self._queue = name
        self._job_id = job_id
        self.short_description = label or f"{name} job"
        self.__name__ = f"lowq_{name}"

    def __call__(self, obj: Any) -> str:
        """The link of an object; Django's mark for "nothing" before it is saved."""
        job_id = self._job_id(obj) if callable(self._job_id) else getattr(obj, self._job_id)
        if job_id is None:
            return "-"
        try:
            root = reverse(f"admin:{_NAME}")
        except NoReverseMatch:
            return str(job_id)
        # A queue's name is escaped twice, as the dashboard does: servers undo it once before they look for the page.
        page = f"{root}queues/{quote(quote(self._queue, safe=''), safe='')}/job?{urlencode({'id': str(job_id)})}"
        link: str = format_html('<a href="{}">{} {}</a>', page, self._queue, job_id)
        return link
