"""Pages: HTML that is complete without JavaScript.

Each module here owns a page, its texts and what its buttons do; its template has the same name. It reads from the
queue's handle, turns values into text, and has `rendering` fill in the template. `rendering` imports no page.
"""

from starlette.routing import Route

from lowq_web.pages import (
    act,
    audit,
    charts,
    dashboard,
    errors,
    job,
    jobs,
    limits,
    nodes,
    queue,
    reshard,
    schedules,
    search,
    shards,
    tasks,
    times,
)

__all__ = ["routes"]


def routes() -> list[Route]:
    """All pages."""
    return [
        Route("/", dashboard.dashboard, name="dashboard"),
        Route("/parts", dashboard.parts, name="parts"),
        Route("/charts", charts.newest_charts, name="charts"),
        Route("/jobs", jobs.jobs, name="jobs"),
        Route("/jobs/act", act.act, methods=["POST"], name="act_on_all"),
        Route("/search", search.search, name="search"),
        Route("/errors", errors.errors, name="errors"),
        Route("/schedules", schedules.schedules, name="schedules"),
        Route("/schedules/act", schedules.act, methods=["POST"], name="act_on_schedule"),
        Route("/limits", limits.limits, name="limits"),
        Route("/nodes", nodes.nodes, name="nodes"),
        Route("/nodes/command", nodes.command, methods=["POST"], name="command"),
        Route("/audit", audit.audit, name="audit"),
        Route("/tasks", tasks.tasks, name="tasks"),
        Route("/tasks/{task}", tasks.task, name="task"),
        Route("/tasks/{task}/cancel", tasks.cancel, methods=["POST"], name="cancel"),
        Route("/queues/{queue:name}", queue.queue, name="queue"),
        Route("/queues/{queue:name}/job", job.job, name="job"),
        Route("/queues/{queue:name}/stack", job.stack, name="stack"),
        Route("/queues/{queue:name}/payload", job.payload, name="payload"),
        Route("/queues/{queue:name}/shards", shards.shards, name="shards"),
        Route("/queues/{queue:name}/times", times.times, name="times"),
        Route("/queues/{queue:name}/act", act.act, methods=["POST"], name="act"),
        Route("/queues/{queue:name}/reshard", reshard.reshard, methods=["GET", "POST"], name="reshard"),
        Route("/queues/{queue:name}/pause", queue.pause, methods=["POST"], name="pause"),
        Route("/queues/{queue:name}/resume", queue.resume, methods=["POST"], name="resume"),
    ]
