"""No time limit for one example: a busy machine would fail properties that hold."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
