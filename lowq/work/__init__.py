"""Jobs out: what is taken of a shard, performed, and reported.

::

    loop         one delivery, from what was taken to what is written: the same for all that perform
    threads      a worker thread: one round trip to Redis after another, and the work that each brings
    event_loop   the same for async workers: many shards at once, with shared round trips
    blocked_loop names the handler that blocks an event loop
    execution    `current`: the batch that is being performed, by which its handler speaks of it
    handler      a worker's instance, and `perform` or `perform_one` with the middlewares around it
    outcome      what becomes of each of its jobs then, and what is logged of it
    time_limits  how long a batch may run, and whose it is
"""
