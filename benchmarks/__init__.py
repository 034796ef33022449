"""Benchmarks: lowq beside its peers, and lowq's own figures.

    python -m benchmarks                lowq and the installed peers in turn, then lowq's own figures
    python -m benchmarks --quick        lowq's own figures, smaller and once
    python -m benchmarks.publish        what the last full run measured, into docs/ and the README

    __main__.py     the command line
    turns.py        whose turn it is: rounds, the lock that others wait for, who is skipped and why
    peers/          one adapter per queue system, lowq among them; `peers/__init__.py` lists them
    figures/        one file per figure or curve of lowq's own; `figures/__init__.py` lists them
    measured.py     a process that is measured, and how one talks to it
    server.py       a fresh redis-server, and what it says of itself
    numbers.py      percentiles, spreads, how numbers are printed
    results.py      what a run measured, as JSON
    tables.py       the tables, of a terminal and of the docs
    plots.py svg.py the plots
    web_cost.py     what the dashboard costs on a million jobs: `make web-cost`

Whatever is measured runs in a process of its own and prints JSON lines; the process that measures sleeps meanwhile.
Only public names of lowq are used, and its command line; `web_cost.py` writes its million jobs into Redis itself.
"""
