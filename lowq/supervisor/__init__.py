"""Several processes of one application: started, watched, replaced when they die or when there is new code.

::

    supervisor  the loop: signals, deploys, restarts
    process     one child process, seen from both ends; a generation: the processes that run the same code
    dashboard   the dashboard beside a node, as a process of its own
"""
