"""A process that performs: leased shards, and threads and an event loop that hand what they take to the workers.

::

    node           starts and stops all of it
    performers     its threads, its event loop, and the broker that gets them shards; replaces threads that hang
    checks         checks and warnings of a start, and its rehearsal
    signals        signals, and requests of other threads, which wake the main thread
    reload         new code for a node that keeps its process and its leases
    schedules      pushes what is due by the time
    watchdog       batches that run for too long, and a process that does not end
"""
