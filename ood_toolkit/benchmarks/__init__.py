"""Suites and the runner that scores every method on them."""
