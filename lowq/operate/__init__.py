"""For people who look and act: jobs, queues, nodes and shards, actions on them, reshards, and examinations.

::

    queries         the reading half of a queue's handle
    commands        its acting half
    queues          the queues in the registry: entries, layouts, shards
    nodes           the nodes in the registry, their batches, and stuck batches
    stats           queues and shards in figures
    job_filter      filters of jobs
    walk            positions of jobs in the sets of shards, in bounded calls, and in the order of all shards
    jobs            jobs by their ids, and pages of jobs of a queue, or of all
    explain         why an id is not performed, and the description of an id
    schedules       schedules: their times, pause and resume
    actions         kick, bury, delete, perform now; release jobs of dead holders; pause and drop queues
    bulk            the same for all jobs that a filter admits, step by step
    reshard         another number of shards for a queue: the mover of its jobs
    layout_switch   a reshard in the registry, its new shards, and writes confirmed by replicas
    audit           the log of people's actions
    doctor          an examination of everything, and repairs
    integrity       whether queues, nodes, shards and ids fit together
    findings        findings, with the texts in findings.toml, and those about the servers of Redis
"""
