"""The simulator: whole systems in one thread, from one seed.

========================  ==============================================================================================
`world`                   virtual time, threads as greenlets, chance
`machine`                 Python's `time`, `threading`, `socket`, `selectors`, `os.urandom` as the world has them
`servers`                 Redis servers on the embedded store: clocks, failovers, clusters, and the network to them
`store`                   the embedded store of a server, each script compiled once
`performers`              nodes and consumers in simulated processes
`story`                   what a seed draws, what is done to the system, and the verdict
`worker`, `__main__`      a process that tells stories, and who starts them: ``make simulate``
========================  ==============================================================================================

lowq's code runs as it is: real nodes, threads, event loops, redis-py's connections, Lua scripts. FoundationDB and
TigerBeetle are tested so. What it does not show: real servers, signals, files, the GIL within a step.
"""
