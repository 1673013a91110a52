"""Set the number of examples that property tests draw, and let each take as long as it needs."""

from hypothesis import settings

# No deadline, because a first example may compile, and perf/ measures speed. Each run draws other examples, so few suffice.
settings.register_profile("tests", deadline=None, max_examples=40)
settings.load_profile("tests")
