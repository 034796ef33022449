"""For people who look and act: what is in the queues, who works them, what is to be done about it, and how far that is.

::

    queries         the reading half of a queue's handle
    commands        its acting half
    queues          which queues there are, their layouts, and where their jobs are
    nodes           which nodes live, what they perform, and which batches are stuck
    stats           queues and shards in figures
    job_filter      which jobs are meant
    walk            positions of jobs in the sets of shards, in bounded calls, and in the order of all shards
    jobs            jobs by their ids, and pages of jobs of a queue, or of all
    explain         why an id is not performed, and all that is known of it
    schedules       when schedules come, pause and resume
    actions         kick, bury, delete, perform now; release what dead holders left
    bulk            the same for all jobs that a filter admits, step by step
    reshard         another number of shards for a queue: how it begins, and the mover of its jobs
    layout_switch   what a reshard writes, confirmed by replicas
    audit           the log of what people did
    doctor          an examination of everything, and repairs
    findings        what a finding is; what there is to say of each kind is in findings.toml
    server          Redis itself: eviction, persistence, memory, clock
    integrity       the keys of a shard, and its ids
"""
