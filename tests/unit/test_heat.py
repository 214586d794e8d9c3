"""What is hot: sampled reads, weighed block by block."""

from kvpool.core.directory.heat import SAMPLE_EVERY, SAMPLES_MAX, WINDOW_S, Heat, HotRun

SECOND_US = 1_000_000


def read(heat, rows, times, now_us=0):
    for _ in range(times):
        heat.note(list(rows), now_us)


def hot(heat, threshold_per_s, copies_max=2, now_us=SECOND_US):
    return list(heat.demand(now_us).hot_runs(threshold_per_s, copies_max))


def test_a_block_is_as_hot_as_all_that_is_read_through_it():
    heat = Heat()
    for tail in range(200):
        read(heat, [1, 2, 3, 100 + tail], 1)

    assert hot(heat, threshold_per_s=5.0) == [HotRun((1, 2, 3), 2)]


def test_what_engines_do_not_read_is_not_hot():
    heat = Heat()
    read(heat, [3, 4], 200)  # they have 1 and 2 themselves

    assert hot(heat, threshold_per_s=5.0) == [HotRun((3, 4), 2)]


def test_hotter_blocks_deserve_more_copies():
    heat = Heat()
    read(heat, [1, 2], 300)
    read(heat, [1], 600)

    assert hot(heat, threshold_per_s=20.0, copies_max=4) == [HotRun((1,), 4), HotRun((2,), 2)]


def test_the_estimate_is_near_the_true_rate():
    heat = Heat()
    read(heat, [1], 1000)

    [samples] = [len(heat.demand(SECOND_US).slices)]

    assert 0.8 * 1000 <= samples * SAMPLE_EVERY <= 1.25 * 1000


def test_callers_that_take_turns_are_all_sampled():
    heat = Heat()
    for _ in range(400):
        for caller in range(SAMPLE_EVERY):
            read(heat, [caller], 1)

    seen = {rows[0] for rows in heat.demand(SECOND_US).slices}

    assert seen == set(range(SAMPLE_EVERY))


def test_a_block_that_is_no_longer_read_cools_down():
    heat = Heat()
    read(heat, [1], 500)

    assert hot(heat, 1.0, now_us=int(WINDOW_S * SECOND_US))
    assert hot(heat, 1.0, now_us=int((WINDOW_S + 1) * SECOND_US)) == []


def test_seeing_a_block_once_says_nothing():
    heat = Heat()
    read(heat, [1], 1)

    assert hot(heat, 0.001) == []


def test_a_full_ring_covers_the_time_since_its_oldest_sample():
    heat = Heat()
    for i in range(4 * SAMPLES_MAX * SAMPLE_EVERY):
        heat.note([1], i * 100)  # 10,000 a second
    demand = heat.demand(4 * SAMPLES_MAX * SAMPLE_EVERY * 100)

    assert len(demand.slices) == SAMPLES_MAX
    assert 8_000 <= SAMPLES_MAX * demand.reads_per_s <= 12_000
