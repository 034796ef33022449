"""Jobs out: what is taken of a shard, performed, and reported.

::

    threads      one round trip to Redis after another, and the work that each brings
    event_loop   the same for async workers: many shards at once, with shared round trips
    batch        what both do alike around a batch: counts, logs, giving it up
    pace         how much work a delivery takes in advance
    handler      a batch through middlewares and handler
    per_id       `perform_one`: a batch id by id, each with its own outcome
    outcome      what becomes of each of its jobs then
    time_limits  how long a batch may run, and whose it is
    own_context  a context of its own for each batch that a task performs
    instances    `setup` and `teardown` of the workers' instances
    activity     what a thread shows to others: what it performs, how much it did
"""
