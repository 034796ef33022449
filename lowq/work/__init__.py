"""Jobs out: what is taken of a shard, performed, and reported.

::

    loop         one delivery, from what was taken to what is written: the same for all that perform
    threads      a worker thread: one round trip to Redis after another, and the work that each brings
    event_loop   the same for async workers: many shards at once, with shared round trips
    blocked_loop names the handler that blocks an event loop
    handler      a batch through middlewares and handler
    execution    `current`: how a handler speaks of its batch
    per_id       `perform_one`: a batch id by id, each with its own outcome
    outcome      what becomes of each of its jobs then
    failures     what is logged of what went wrong
    time_limits  how long a batch may run, and whose it is
    instances    `setup` and `teardown` of the workers' instances
"""
