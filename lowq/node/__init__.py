"""A process that performs: a broker, and threads and an event loop that hand what they take to the workers.

::

    node           starts and stops all of it
    signals        what wakes it: signals, and other threads that want something of it
    reload         new code for a node that keeps its process and its leases
    worker_thread  one round trip to Redis after another, and the work that each brings
    event_loop     the same for async workers: many shards at once, with shared round trips
    batch          what both do alike around a batch: counts, logs, giving it up
    pace           how much work a delivery takes in advance
    execution      a batch through middlewares and handler
    outcome        what becomes of each of its jobs then
    own_context    a context of its own for each batch that a task performs
    log_context    what a handler logs says which job it is about
    job_log        a line for each job that begins and ends, at DEBUG
    instances      `setup` and `teardown` of the workers' instances
    per_id         `perform_one`: a batch id by id, each with its own outcome
    schedules      pushes what is due by the time
    time_limits    how long a batch may run, and whose it is
    watchdog       looks whether a batch runs for too long
    observing      what observers are told of a batch
    readings       what the node says in figures
    activity       what a thread shows to others: what it performs, how much it did
"""
