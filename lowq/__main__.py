"""``python -m lowq``: the command line."""

from lowq.cli import main

main(prog_name="lowq")
