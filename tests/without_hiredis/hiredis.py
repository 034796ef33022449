"""Where this folder is on PYTHONPATH, hiredis is not installed."""

raise ImportError("this process is to do without hiredis")
