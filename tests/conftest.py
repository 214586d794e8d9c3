"""Hypothesis profiles: ``ci`` finds the same examples every time and is quick, ``dev`` searches on.

``KVPOOL_HYPOTHESIS_PROFILE=dev pytest tests/property`` looks for new failures; it prints how to repeat one.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=400, stateful_step_count=50)
settings.register_profile("dev", deadline=None, max_examples=5_000, stateful_step_count=80, print_blob=True)
settings.load_profile(os.environ.get("KVPOOL_HYPOTHESIS_PROFILE", "ci"))
