"""What people change by hand: single ids, many jobs in bounded steps, and the log of who did that.

::

    actions  kick, bury, delete, perform now, pause, resume, drop
    bulk     the same for many jobs, step by step, over all shards
    audit    what people did on the dashboard
    passwords  the hashes of the dashboard's users
    logins   failed logins of the dashboard
    handover  what processes of the dashboard leave for each other
    tasks    the bulk actions that run in the background of some process
"""
