"""A process that performs: leased shards, and threads and an event loop that hand what they take to the workers.

::

    node           starts and stops all of it
    signals        what wakes it: signals, and other threads that want something of it
    reload         new code for a node that keeps its process and its leases
    schedules      pushes what is due by the time
    watchdog       looks whether a batch runs for too long
    readings       what the node says in figures
    process_end    ends a process that does not end by itself
"""
