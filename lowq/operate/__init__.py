"""For people who look and act: what is in the queues, who works them, what is to be done about it, and how far that is.

::

    queues       which queues there are, and their layouts
    nodes        which nodes live, what they perform, and which batches are stuck
    stats        queues and shards in figures
    job_filter   which jobs are meant
    walk         positions of jobs over all shards, in bounded steps
    paging       pages of jobs
    all_queues   jobs of all queues in one order
    jobs         the reading half of a queue's handle: single ids, and pages
    explain      why an id is not performed, and all that is known of it
    schedules    schedules: when they come, pause and resume
    actions      kick, bury, delete, perform now; release what dead holders left
    bulk         the same for all jobs that a filter admits, step by step
    background   bulk actions that run in the background of a process
    reshard      another number of shards for a queue
    audit        the log of what people did
    logins       passwords of the dashboard's users, and failed logins
    token_store  values that processes of the dashboard leave for each other
    doctor       an examination of everything, and repairs
    findings     what a finding is, and what there is to say of each kind
    server       Redis itself: eviction, persistence, memory, clock
    suspicions   who works what, and what does not fit
    integrity    the keys of a shard, and its ids
"""
