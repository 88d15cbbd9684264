"""A mesh with named dimensions: the groups that Megatron, torchtitan and DeepSpeed make, and what holds for any."""

from __future__ import annotations

import json
import pickle
import re
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core.dims import NAMES, ORDERS, Dims
from clustersim.core.errors import ProgramError, ScenarioError
from clustersim.core.mesh import Mesh
from tests.tables import table_rows


class Row(NamedTuple):
    """A line of tests/data/rank_groups.csv: groups that a framework's own code made."""

    id: str
    config: str
    quantity: str
    value: str
    source: str


ROWS = [Row(**row) for row in table_rows(ROOT / "tests/data/rank_groups.csv")]
BY_DEEPSPEED = {"pipe": "pp", "data": "dp", "model": "tp"}


def mesh(dims: Dims, per_node: int = 8) -> Mesh:
    return Mesh(np.arange(dims.world), min(per_node, dims.world), dims=dims)


def dims_of(row: Row) -> Dims:
    """The degrees of a row: of Megatron in JSON, of the others in its id."""
    if row.config.startswith("DeepSpeed"):
        return Dims(pp=2, dp=4, tp=2, order="deepspeed")
    if row.config.startswith("torchtitan"):
        return Dims(pp=2, dp=2, cp=2, tp=2, ep=4, etp=1, order="torchtitan")
    config = json.loads(row.config)
    world = config.pop("world")
    inner = config.get("tp", 1) * config.get("cp", 1) * config["pp"]
    return Dims(dp=world // inner, **config)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.id}-{row.quantity}")
def test_groups_are_those_of_the_frameworks_own_code(row):
    names, _, count = row.quantity.partition(" ")
    names = [BY_DEEPSPEED.get(name, name) for name in names.split("-")]
    groups = mesh(dims_of(row)).groups(*names)
    expected = json.loads(row.value)
    assert groups[: len(expected)].tolist() == expected
    assert len(groups) == (int(re.findall(r"\d+", count)[-1]) if count else len(expected))


def test_every_row_of_the_shared_table_is_tested(shared):
    theirs = [row for row in table_rows(shared / "facts/model_parallel_examples.csv") if row["kind"] == "rank_groups"]
    assert [tuple(row[name] for name in Row._fields) for row in theirs] == [tuple(row) for row in ROWS]
    assert len(ROWS) == 73


degree = st.sampled_from([1, 2, 3, 4])


@st.composite
def meshes(draw) -> Mesh:
    tp, cp, dp, pp, parts = (draw(degree) for _ in range(5))
    inside = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, inside + 1) if inside % n == 0]))
    rest = inside // etp
    ep = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    replicas = [n for n in range(1, parts + 1) if dp % n == 0 and rest // ep % n == 0]
    return mesh(
        Dims(
            tp=tp,
            cp=cp,
            dp=dp,
            pp=pp,
            ep=ep,
            etp=etp,
            dp_replicate=draw(st.sampled_from(replicas)),
            cp_a2a=draw(st.sampled_from([n for n in (1, 2) if cp % n == 0])),
            order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "dp-ep-cp-tp-pp", "ep-tp-dp-cp-pp", "deepspeed"])),
        ),
        per_node=tp * cp * dp * pp,
    )


DENSE = [name for name in NAMES if name not in {"etp", "ep", "edp", "efsdp"}]
names = st.one_of(
    st.lists(st.sampled_from(DENSE), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["etp", "ep", "edp", "efsdp", "pp"]), min_size=1, max_size=3, unique=True),
)


@given(meshes(), names)
def test_groups_over_any_dimensions_hold_every_rank_once(made, dims):
    groups = made.groups(*dims)
    assert groups.shape == (made.workers // made.size(*dims), made.size(*dims))
    assert sorted(groups.ravel().tolist()) == list(range(made.workers))


@given(meshes(), names)
def test_a_coordinate_is_the_place_in_the_group_and_members_share_all_others(made, dims):
    places = made.coordinates(*dims)
    for group in made.groups(*dims)[:4]:
        assert places[group].tolist() == list(range(len(group)))
        rest = [name for name in DENSE if name not in dims and made.groups(name).shape[1] > 1]
        if len(dims) == 1 and dims[0] in {"tp", "pp"}:
            for name in rest:
                assert len(set(made.coordinates(name)[group].tolist())) == 1


@given(meshes())
def test_coordinates_of_a_factorisation_name_one_rank(made):
    for factors in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        at = [made.coordinate(rank) for rank in range(made.workers)]
        assert len({tuple(where[name] for name in factors) for where in at}) == made.workers
        last = at[-1]
        assert made.ranks(**{name: last[name] for name in factors}).tolist() == [made.workers - 1]


@given(meshes())
def test_pipelines_of_dense_layers_and_of_experts_are_the_same_ranks(made):
    of_experts = made.layout.expert_axes
    stride = made.layout.size_of(of_experts[: of_experts.index("pp")])
    groups = made.groups("pp")
    assert (np.diff(groups, axis=1) == stride).all()
    for stage in range(made.size("pp")):
        assert made.ranks(pp=stage).tolist() == sorted(groups[:, stage].tolist())


@given(meshes(), names)
def test_a_group_is_one_read_only_array_at_every_call_and_in_any_order(made, dims):
    groups = made.groups(*dims)
    assert made.groups(*dims) is groups
    assert made.groups(*reversed(dims)) is groups
    with pytest.raises(ValueError, match="read-only"):
        groups[0, 0] = 1


def test_without_dimensions_a_mesh_is_data_parallel():
    plain = Mesh(np.arange(16), 8)
    assert plain.groups("dp").tolist() == [list(range(16))]
    assert plain.groups("tp").tolist() == [[rank] for rank in range(16)]
    assert (plain.size("dp"), plain.size("pp"), plain.coordinate(5)["dp"]) == (16, 1, 5)


def test_servers_are_in_no_group():
    served = Mesh(np.arange(10), 8, servers=2)
    assert served.groups("dp").tolist() == [list(range(8))]
    with pytest.raises(ProgramError, match="rank 8 is none of the 8 workers"):
        served.coordinate(8)


def test_replicas_are_outside_shards_and_fsdp_shards_over_context_too():
    made = mesh(Dims(tp=2, cp=2, dp=4, dp_replicate=2))
    assert made.groups("dp_shard", "cp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert made.groups("dp_replicate")[0].tolist() == [0, 8]


def test_the_inner_all_to_all_of_context_parallelism_is_over_neighbours():
    made = mesh(Dims(tp=1, cp=8, cp_a2a=4))
    assert made.groups("cp_a2a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made.groups("cp_p2p").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_llama_3_has_data_parallelism_outermost():
    made = mesh(Dims(tp=2, pp=2, dp=4, order="llama3"))
    assert made.groups("dp")[0].tolist() == [0, 4, 8, 12]
    assert set(ORDERS["llama3"].split("-")) == set(ORDERS["megatron"].split("-"))


def test_tp_beside_experts_means_the_ranks_that_cut_an_expert():
    made = mesh(Dims(tp=4, dp=4, ep=8, etp=2))
    assert made.groups("tp", "ep") is made.groups("etp", "ep")


def test_a_copy_sent_to_another_process_makes_the_same_groups():
    made = mesh(Dims(tp=2, dp=4))
    made.groups("dp")
    assert pickle.loads(pickle.dumps(made)).groups("dp").tolist() == made.groups("dp").tolist()


WRONG = {
    "degree": ({"tp": 0}, "tp = 0: a degree is at least 1 (at $.parallel.tp)"),
    "token": ({"order": "tp-xp"}, "'xp' is no dimension"),
    "preset": ({"order": "megatrn"}, "did you mean 'megatron'?"),
    "twice": ({"order": "tp-tp"}, "names a dimension twice (at $.parallel.order)"),
    "left out": ({"dp": 2, "order": "tp-pp"}, "leaves out dp, whose degree is 2 (at $.parallel.order)"),
    "experts": (
        {"tp": 2, "dp": 2, "ep": 3},
        "etp 2 * ep 3 * pp 1 = 6 does not divide the world of 4 (at $.parallel.ep)",
    ),
    "pipelines": (
        {"tp": 2, "dp": 4, "pp": 2, "ep": 4, "etp": 1, "order": "tp-ep-pp-dp"},
        "gives dense layers (dp 4) and experts (edp 2) different pipelines; end it in pp",
    ),
    "replicas": (
        {"dp": 4, "dp_replicate": 3},
        "dp_replicate = 3 does not divide dp 4; use 2 or 4 (at $.parallel.dp_replicate)",
    ),
    "expert replicas": ({"tp": 1, "dp": 4, "ep": 4, "dp_replicate": 2}, "does not divide edp 1"),
    "inner all-to-all": ({"cp": 4, "cp_a2a": 3}, "cp_a2a = 3 does not divide cp 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_degrees_that_fit_no_world_are_one_line_with_field_and_value(case):
    degrees, said = WRONG[case]
    with pytest.raises(ScenarioError) as raised:
        Dims(**degrees)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_world_of_another_size_is_refused():
    with pytest.raises(ProgramError, match=r"tp 2 \* cp 1 \* dp 4 \* pp 1 = 8 is not the 16 workers"):
        Mesh(np.arange(16), 8, dims=Dims(tp=2, dp=4))


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (("tq",), "no dimension 'tq' in a mesh; known: cp,"),
        (("dp_shrad",), "did you mean 'dp_shard'?"),
        (("cp", "ep"), "'cp_a2a' is no dimension of the experts"),
    ],
)
def test_groups_that_no_mesh_has_are_refused(dims, said):
    with pytest.raises(ProgramError, match=re.escape(said)):
        mesh(Dims(tp=2, cp=2)).groups(*dims)


def test_a_coordinate_beyond_the_mesh_is_refused():
    with pytest.raises(ProgramError, match="pp = 2: the mesh has 2 along pp, counted from 0"):
        mesh(Dims(pp=2, dp=2)).ranks(pp=2)
