"""Tasks: those of django-tasks' own suite, and some with a key."""

from typing import Any

import django

import lowq
from lowq.contrib.django.tasks import task as lowq_task

if django.VERSION >= (6,):
    from django.tasks import TaskContext, task
else:
    from django_tasks import TaskContext, task

#: What was called.
calls: list[Any] = []


@task()
def noop_task(*args: Any, **kwargs: Any) -> None:
    return None


@task
def noop_task_from_bare_decorator(*args: Any, **kwargs: Any) -> None:
    return None


@task()
async def noop_task_async(*args: Any, **kwargs: Any) -> None:
    return None


@task()
def calculate_meaning_of_life() -> int:
    return 42


@task(queue_name="loop")
async def think(numbers: int) -> int:
    calls.append(numbers)
    return numbers


@task(queue_name="mail")
def failing_task_value_error() -> None:
    raise ValueError("This task failed due to ValueError")


@task(queue_name="mail")
def failing_task_system_exit() -> None:
    raise SystemExit("This task failed due to SystemExit")


@task(queue_name="mail")
def failing_task_time_limit() -> None:
    raise lowq.TimeLimitExceeded("This task took too long")


@task(queue_name="mail")
def complex_exception() -> None:
    raise ValueError(ValueError("This task failed"))


@task(queue_name="mail")
def complex_return_value() -> Any:
    return lambda: True


@task(takes_context=True)
def get_task_id(context: TaskContext) -> str:
    found: str = context.task_result.id
    return found


#: What `patient` raises, one after the other.
errors: list[Exception] = []


@task(queue_name="patient")
def patient() -> None:
    if errors:
        raise errors.pop(0)


@task(takes_context=True)
def second_time_lucky(context: TaskContext) -> int:
    attempt: int = context.attempt
    if attempt == 1:
        raise ConnectionError("the first time")
    return attempt


@task(backend="no_results", queue_name="at_once")
def at_once(number: int) -> None:
    calls.append(number)


@lowq_task(key="order_id")
def invoice(order_id: int, version: int) -> None:
    calls.append((order_id, version))


@lowq_task(key=lambda order, **_more: f"order:{order['id']}", queue_name="mail")
def ship(order: dict[str, Any], to: str = "home") -> None:
    calls.append((order["id"], to))
