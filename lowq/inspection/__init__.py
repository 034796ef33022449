"""Read only: what is in the queues, who works them, and why an id is not performed right now.

::

    registry     which queues there are, and which nodes live
    queries      stats, shards, jobs, single ids
    calls        calls to many shards, a few at a time
    job_filter   which jobs are meant
    paging       jobs in order over all shards, a page at a time
    pattern      ids by a pattern
    content      what is in a payload
    sifting      pages of jobs by what is in them
    all_queues   jobs of all queues in one order
    figures      queues and shards in figures
    description  everything that is known of an id
    explain      why an id is not performed
    overview     all queues at once
    server_info  what Redis says of itself
"""
