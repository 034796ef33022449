"""Jobs in: pushes are validated, encoded, combined into writes, and sent again where they were refused.

::

    push.py        one push: read, prepared, sent in chunks, and what the caller is told
    target.py      where it goes: the queue, its shards, how jobs are encoded for them; how coroutines look it up;
                   ticks of schedules
    batcher.py     threads: one push goes at once, those that come meanwhile go together
    event_loop.py  coroutines: the same, by the loop itself
    calls.py       requests, their parts, and the script calls that they share
    write.py       requests that leave together: attempts, repeats, outcomes
    router.py      what was refused for now: sent again, in the callers' order
"""
