"""Between any hosts every element takes one way, and a host sends no more than it must."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpikv.transports.routes import routes_of

FEWEST = 8192
"""Elements of an owner that are not divided among carriers."""


@st.composite
def layouts(draw):
    """Return the ranks of each host, dealt anyhow, and how many elements each rank owns."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    ranks = draw(st.permutations(range(sum(sizes))))
    ends = np.cumsum(sizes)
    hosts = [tuple(sorted(ranks[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
    hosts.sort()
    counts = draw(st.lists(st.integers(0, 700) | st.integers(0, 50_000), min_size=len(ranks), max_size=len(ranks)))
    return hosts, counts


@given(layouts())
def test_every_element_goes_once_from_each_other_host_to_its_owner(layout):
    hosts, counts = layout
    starts = np.concatenate(([0], np.cumsum(counts)))
    for home in hosts:
        arrived = np.zeros(int(starts[-1]), int)
        for rank in home:
            for carrier, owner, low, high in routes_of(rank, hosts, counts).as_carrier:
                assert carrier == rank
                assert owner not in home
                assert starts[owner] <= low < high <= starts[owner + 1]
                arrived[low:high] += 1
        outside = [0 if rank in home else 1 for rank in range(len(counts))]
        np.testing.assert_array_equal(arrived, np.repeat(outside, counts))


@given(layouts())
def test_both_ends_know_of_each_message_and_no_pair_has_two(layout):
    """Messages of one pair are told apart by nothing."""
    hosts, counts = layout
    routes = [routes_of(rank, hosts, counts) for rank in range(len(counts))]
    sent = [route for each in routes for route in each.as_carrier]
    assert sorted(sent) == sorted(route for each in routes for route in each.as_owner)
    assert len({(route.carrier, route.owner) for route in sent}) == len(sent)


@given(layouts())
def test_carriers_share_the_work(layout):
    hosts, counts = layout
    for home in hosts:
        for host in hosts:
            if host is home:
                continue
            wanted = [counts[rank] for rank in host if counts[rank]]
            shares = min(len(home), max(len(wanted), sum(wanted) // FEWEST, 1))
            work = dict.fromkeys(home, 0)
            for carrier in home:
                for _, owner, low, high in routes_of(carrier, hosts, counts).as_carrier:
                    work[carrier] += high - low if owner in host else 0
            assert max(work.values()) <= sum(wanted) / shares + 64


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 300))
def test_what_leaves_a_host(hosts, per_host, each):
    """Of m elements, equally divided, (H - 1) / H in a reduce_scatter; in an all_gather m / H to each other host."""
    ranks = np.arange(hosts * per_host).reshape(per_host, hosts).T.tolist()
    whole = each * hosts * per_host
    for home in ranks:
        routes = [routes_of(rank, ranks, [each] * (hosts * per_host)) for rank in home]
        reduced = sum(route.high - route.low for own in routes for route in own.as_carrier)
        gathered = sum(route.high - route.low for own in routes for route in own.as_owner)
        assert reduced * hosts == (hosts - 1) * whole
        assert gathered * hosts == (hosts - 1) * whole
