"""Several processes of one application: started, watched, replaced when they die or when there is new code.

::

    supervisor  the loop: signals, deploys, restarts
    generation  the processes that run the same code
    process     one child process, and how it ended; whether the code that is on the disk can be run
    dashboard   the dashboard beside a node, as a process of its own
    reload      new code as soon as a file changes, for development
"""
