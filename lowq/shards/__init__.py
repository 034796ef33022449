"""Hold shards and take from them: what a node and a consumer have in common.

::

    broker       the whole: one object with start() and stop()
    membership   this process lives, and which others share the work
    splitter     which shards it is to have, given who shares the work
    leases       gets those, keeps them, gives up the others
    maintenance  the loop that does all this in time: renewals, heartbeats, sweeps, early acknowledgements
    wakeups      what others publish: work came, a lease was released, members changed
    dispatcher   who works which shard next: its claims, wake-ups, sleep
    scheduler    which queue comes next, so that each has its share of the threads, and which shard of that queue
    permits      what a queue has of its limits over all nodes
    limits       gets and gives back what limits over all nodes allow
    call_limits  the same for limits around calls
    shard        one shard: its name, what its owners keep of it, and what those who work it show to the loop; sweeps
    lease        the right to work it for a while: got, renewed, given up
    delivery     what was taken of it, and what becomes of that: acknowledge, fail, release, bury
    outage       since when Redis doesn't answer
"""
