"""Other people's tracing, metrics and error reporting, each a module with ``instrument(app)``::

    import lowq.contrib.sentry

    lowq.contrib.sentry.instrument()

They need the extras of their names, and nothing else of lowq imports them.
"""
