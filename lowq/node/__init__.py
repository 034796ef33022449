"""A process that performs: leased shards, and threads and an event loop that hand what they take to the workers.

::

    node           starts and stops all of it
    performers     its threads and its event loop, and those that are written off
    broker         its part in the work: what the broker is told of queues, workers and schedules
    checks         what it looks at when it starts, and the rehearsal of a start
    signals        what wakes it: signals, and other threads that want something of it
    reload         new code for a node that keeps its process and its leases
    schedules      pushes what is due by the time
    watchdog       looks whether a batch runs for too long
    process_end    ends a process that does not end by itself
"""
