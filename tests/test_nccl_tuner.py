"""NCCL's tuner: its own figures come out, choices follow pins, and the model behaves."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_systems import ALGORITHMS, KINDS, VIEWS, example, system, table

from clustersim.collectives.nccl.graph import ChannelGraph
from clustersim.collectives.nccl.ratings import Rating, ratings
from clustersim.collectives.nccl.search import exec_channels, search
from clustersim.collectives.nccl.tuner import TunerCandidate, candidates, channels_used, choose
from clustersim.collectives.nccl.view import NcclRequest, System
from clustersim.core.errors import ProgramError
from clustersim.core.topology import PATH_CLASSES

GOLDEN = table("tuner")
CASES = sorted({(row["system"], int(row["nodes"]), row["collective"]) for row in GOLDEN})
EXAMPLE_ROWS = table("examples")


@lru_cache
def printed_graphs(name: str, nodes: int) -> dict[str, ChannelGraph] | None:
    """The search result NCCL printed, if the table has it."""
    graphs = {}
    for row in table("graphs"):
        if (row["system"], int(row["nodes"])) == (name, nodes):
            graphs[ALGORITHMS[row["algo"]]] = ChannelGraph(
                pattern=int(row["pattern"]),
                n_channels=int(row["search_channels"]),
                bw_intra=float(row["bwIntra"]),
                bw_inter=float(row["bwInter"]),
                type_intra=PATH_CLASSES.index(row["typeIntra"]),
                type_inter=PATH_CLASSES.index(row["typeInter"]),
                same_channels=row["sameChannels"] == "1",
                cross_nic=int(row["crossNic"]),
            )
    return graphs | {"nvls_tree": graphs["nvls"]} if graphs else None


def compare(rated: tuple[Rating, ...], name: str, nodes: int, collective: str) -> None:
    """The same pairs are allowed, with the same latency and bandwidth as printed (two decimals)."""
    wanted = {
        (ALGORITHMS[row["algorithm"]], row["protocol"]): (float(row["lat_us"]), float(row["bw_GBps"]))
        for row in GOLDEN
        if (row["system"], int(row["nodes"]), row["collective"]) == (name, nodes, collective)
    }
    found = {(r.algorithm, r.protocol): (r.latency, r.bandwidth) for r in rated if not r.why}
    assert found.keys() == wanted.keys()
    for pair, figures in wanted.items():
        assert found[pair] == pytest.approx(figures, abs=0.0051), pair


@pytest.mark.parametrize(("name", "nodes", "collective"), [case for case in CASES if printed_graphs(*case[:2])])
def test_ratings_from_the_printed_search_are_nccls_own(name: str, nodes: int, collective: str) -> None:
    graphs = printed_graphs(name, nodes)
    compare(ratings(KINDS[collective], system(name, nodes), graphs), name, nodes, collective)


@pytest.mark.parametrize(("name", "nodes", "collective"), CASES)
def test_ratings_from_our_own_search_are_nccls_own(name: str, nodes: int, collective: str) -> None:
    described = system(name, nodes)
    compare(ratings(KINDS[collective], described, search(described)), name, nodes, collective)


@pytest.mark.parametrize(
    "row", EXAMPLE_ROWS, ids=lambda r: f"{r['system']}-{r['nodes']}-{r['collective']}-{r['bytes']}"
)
def test_choices_and_times_are_nccls_own(row: dict[str, str]) -> None:
    chosen = choose(KINDS[row["collective"]], float(row["bytes"]), example(row["system"], int(row["nodes"])))
    algorithm, protocol = row["algo_proto"].split("/")
    assert (chosen.algorithm, chosen.protocol) == (ALGORITHMS[algorithm], protocol)
    assert chosen.time_s * 1e6 == pytest.approx(float(row["time_us"]), rel=1e-3, abs=0.006)


# ------------------------------------------------------------------------------------------------------ behaviour

systems = st.builds(
    system, st.sampled_from(["dgx1v", "dgxa100", "dgxh100", "pcie_rtx4090"]), st.sampled_from([1, 2, 16])
)
sizes = st.floats(1.0, 2.0**36)


@given(systems, st.sampled_from(sorted(KINDS.values())), sizes)
def test_twice_the_bytes_never_take_less_time(described: System, kind: str, nbytes: float) -> None:
    once = {(c.algorithm, c.protocol): c.time_s for c in candidates(kind, nbytes, described)}
    twice = {(c.algorithm, c.protocol): c.time_s for c in candidates(kind, 2 * nbytes, described)}
    assert once.keys() == twice.keys()
    assert all(twice[pair] >= time for pair, time in once.items())


@given(systems, sizes, st.floats(1.0, 2.0))
def test_more_bytes_never_take_a_ring_less_time(described: System, nbytes: float, more: float) -> None:
    for protocol in ("LL", "Simple"):
        less = choose("all_reduce", nbytes, described, algorithm="ring", protocol=protocol)
        assert choose("all_reduce", nbytes * more, described, algorithm="ring", protocol=protocol).time_s >= less.time_s


@given(systems, st.sampled_from(sorted(KINDS.values())), sizes)
def test_the_choice_is_the_fastest_candidate(described: System, kind: str, nbytes: float) -> None:
    rated = candidates(kind, nbytes, described)
    assert choose(kind, nbytes, described).time_s == min(c.time_s for c in rated)
    assert all(c.latency_s > 0 and c.bandwidth > 0 for c in rated)


@pytest.mark.parametrize("name", ["dgx1v", "dgxa100", "dgxh100"])
@pytest.mark.parametrize("nodes", [2, 16])
def test_faster_nics_never_slow_a_large_all_reduce(name: str, nodes: int) -> None:
    times = []
    for rate in (6.25, 12.5, 25.0, 50.0):
        view = VIEWS[name]
        view = replace(view, nics=tuple(msgspec.structs.replace(nic, bandwidth=rate) for nic in view.nics))
        times.append(choose("all_reduce", 2.0**30, System(nodes, nodes * 8, (view,))).time_s)
    assert times == sorted(times, reverse=True)


def test_one_rank_takes_no_time_to_speak_of() -> None:
    view = replace(VIEWS["dgxh100"], gpus=VIEWS["dgxh100"].gpus[:1], dev=(0,), nics=())
    assert choose("all_reduce", 1e6, System(1, 1, (view,))).time_s < 1e-6


def test_pat_is_for_one_gpu_a_node() -> None:
    view = replace(VIEWS["dgxh100"], gpus=VIEWS["dgxh100"].gpus[:1], dev=(0,))
    lone = System(16, 16, (view,))
    table_of = {(r.algorithm, r.protocol): r for r in ratings("all_gather", lone, search(lone))}
    assert table_of["pat", "Simple"].latency == pytest.approx(8 + 4 * 14 / 3.5 + 2.8 * 16)
    assert "one GPU a node" in {r.algorithm: r.why for r in ratings("all_gather", *full(2))}["pat"]
    assert all(c.algorithm != "pat" for c in candidates("all_gather", 1e3, lone, asked=NcclRequest(version=(2, 22))))


def full(nodes: int) -> tuple[System, dict[str, ChannelGraph]]:
    described = system("dgxh100", nodes)
    return described, search(described)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_eight_bit_sums_over_many_ranks_avoid_the_ring(dtype: str) -> None:
    assert choose("all_reduce", 2.0**30, system("dgxa100", 2), NcclRequest(dtype)).algorithm == "tree"
    assert choose("all_gather", 2.0**30, system("dgxa100", 2), NcclRequest(dtype)).algorithm == "ring"


@pytest.mark.parametrize(("dtype", "redop"), [("fp32", "prod"), ("int8", "sum")])
def test_switches_reduce_only_what_they_can(dtype: str, redop: str) -> None:
    plain = choose("all_reduce", 2.0**30, system("dgxh100", 1))
    assert plain.algorithm == "nvls"
    assert choose("all_reduce", 2.0**30, system("dgxh100", 1), NcclRequest(dtype, redop)).algorithm == "ring"


# ------------------------------------------------------------------------------------------------------ pins


@pytest.mark.parametrize(
    ("pin", "algorithm"),
    [
        ("Ring", "ring"),
        ("tree", "tree"),
        ("NVLSTree", "nvls_tree"),
        ("nvls_tree", "nvls_tree"),
        ("^tree,nvlstree", "ring"),
    ],
)
def test_pins_are_read_as_nccl_algo(pin: str, algorithm: str) -> None:
    assert choose("all_reduce", 2.0**30, system("dgxh100", 2), algorithm=pin).algorithm == algorithm


@pytest.mark.parametrize("pin", ["LL", "ll128", "Simple"])
def test_pins_are_read_as_nccl_proto(pin: str) -> None:
    assert choose("all_reduce", 2.0**30, system("dgxh100", 2), protocol=pin).protocol.lower() == pin.lower()


def test_a_pinned_ll128_is_used_where_nccl_would_not_by_itself() -> None:
    boxes = system("pcie_a100_sw", 2)
    assert "LL128" not in {c.protocol for c in candidates("all_reduce", 1e6, boxes)}
    assert choose("all_reduce", 1e6, boxes, protocol="LL128").protocol == "LL128"


@pytest.mark.parametrize(
    ("kind", "pins", "message"),
    [
        ("all_reduce", {"algorithm": "Rign"}, "did you mean 'Ring'"),
        ("all_reduce", {"protocol": "LL129"}, "did you mean 'LL128'"),
        ("broadcast", {"algorithm": "Tree"}, "only ring do it"),
        ("all_reduce", {"algorithm": "NVLS", "protocol": "LL"}, "possible here"),
        ("all_reduce", {"algorithm": "NVLS"}, "SHARP"),
        ("all_reduce", {"algorithm": "CollNetDirect"}, "SHARP"),
        ("all_to_all", {}, "nothing|no algorithms"),
    ],
)
def test_a_pin_that_leaves_nothing_says_what_would_do(kind: str, pins: dict[str, str], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        choose(kind, 1e6, system("dgxh100", 2), **pins)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize(
    "version", [(2, 8), (2, 12), (2, 14), (2, 18), (2, 19), (2, 22), (2, 23), (2, 27), (2, 30), (3, 0)]
)
@pytest.mark.parametrize("kind", sorted(KINDS.values()))
def test_every_version_chooses_something(version: tuple[int, int], kind: str) -> None:
    for name in ("dgx1v", "dgxa100", "dgxh100", "dgxb200"):
        for nodes in (1, 2, 16):
            assert choose(kind, 2.0**26, system(name, nodes), asked=NcclRequest(version=version)).time_s > 0


@pytest.mark.parametrize(
    ("version", "latency"), [((2, 12), 3.6 + 14 * 0.47), ((2, 18), 6.6 + 14 * 0.6), ((2, 28), 6.6 + 14 * 0.6)]
)
def test_small_rings_follow_the_latencies_of_their_version(version: tuple[int, int], latency: float) -> None:
    chosen = choose(
        "all_reduce", 8.0, system("dgxa100", 1), algorithm="ring", protocol="LL", asked=NcclRequest(version=version)
    )
    assert chosen.latency_s * 1e6 == pytest.approx(latency)


def test_old_versions_know_no_nvls() -> None:
    old = candidates("all_reduce", 2.0**30, system("dgxh100", 1), asked=NcclRequest(version=(2, 14)))
    assert {c.algorithm for c in old} == {"ring", "tree"}


# ------------------------------------------------------------------------------------------------------ channels


@given(systems, st.sampled_from(["all_reduce", "all_gather"]), sizes)
def test_channels_grow_with_the_message_up_to_all(described: System, kind: str, nbytes: float) -> None:
    blocks = exec_channels(described, search(described))
    for candidate in candidates(kind, nbytes, described):
        used = channels_used(candidate, nbytes, described, kind)
        assert 1 <= used <= (32 if candidate.algorithm.startswith("nvls") else blocks)
        assert used <= channels_used(candidate, 2 * nbytes, described, kind)
        assert channels_used(candidate, 2.0**40, described, kind) >= used


def test_a_few_bytes_run_on_one_channel() -> None:
    described = system("dgxh100", 1)
    assert channels_used(TunerCandidate("ring", "LL", 0.0, 1.0, 0.0), 8.0, described) == 1


def test_choosing_again_takes_far_less_than_a_millisecond(benchmark: object) -> None:
    described = system("dgxh100", 16)
    choose("all_reduce", 1.0, described)
    benchmark(lambda: choose("all_reduce", 2.0**26, described))  # type: ignore[operator]
