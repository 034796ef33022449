"""Jobs out: what is taken of a shard, performed, and reported.

::

    threads      a worker thread: one round trip to Redis after another, and the work that each brings
    event_loop   the same for async workers: many shards at once, with shared round trips
    loop         one delivery, batch by batch, from what was taken to what is written: the same for all that perform
    handler      `perform` or `perform_one` with the middlewares around it; `current`, the batch that it performs
    lifecycle    setup and teardown of instances, and of what all async workers of a process share
    outcome      what becomes of each job of a batch, and what is logged of it
    time_limits  how long a batch may run, and whose it is
"""
