"""The simulation finds bugs: each of these is put in on purpose, and must be found."""

import pytest

from .mutations import MUTATIONS
from .schedule import run_schedule
from .searching import SEED
from .shims import replaced

SCHEDULES = 1_500

pytestmark = pytest.mark.skipif(SEED is not None, reason="KVPOOL_SIM_SEED names a schedule of its own")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_pool_is_found_out(mutation):
    with replaced(mutation()):
        assert any(run_schedule(seed, validate=True).violations for seed in range(SCHEDULES))
