"""The version of this package. What is built from the repository has it from here."""

VERSION = "0.1.0"
