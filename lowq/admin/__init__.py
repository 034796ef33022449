"""What people change by hand: single ids, many jobs in bounded steps, and the log of who did that.

::

    actions  kick, bury, delete, perform now, pause, resume, drop
    bulk     the same for many jobs, step by step, over all shards
    audit    what people did on the dashboard
    tasks    the bulk actions that run in the background of some process
"""
