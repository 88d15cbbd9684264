"""``clustersim new`` of long samples: their tokens are shared out over GPUs."""

from __future__ import annotations

import tomllib

import pytest

from clustersim.studies.plan.spec import load


@pytest.mark.parametrize(("recipe", "degrees"), [("torchtitan", {"tp": 1}), ("megatron", {"pp": 1})])
def test_a_long_context_is_shared_out_before_layers_are_recomputed(clustersim, tmp_path, recipe, degrees):
    """131,072 tokens on one GPU do not fit, and the recipes knew no other way."""
    words = ("--gpu", "H200", "--nodes", "2", "--model", "llama3-8b", "--seq-len", "131072", "--recipe", recipe)
    done = clustersim("new", "scenario", tmp_path / "s.toml", *words)
    table = tomllib.loads((tmp_path / "s.toml").read_text())
    assert done.stdout.startswith("wrote")
    assert "fits" in done.stdout
    assert table["model"]["seq_len"] == 131072
    assert table["model"]["activation_checkpointing"] != "full"
    assert table["parallel"]["cp"] > 1
    assert table["parallel"].items() >= degrees.items()


def test_a_plan_of_long_samples_tries_context_parallelism_and_batches_of_as_many_tokens(clustersim, tmp_path):
    words = ("--gpu", "H200", "--nodes", "8", "--model", "llama3-8b", "--seq-len")
    for length in (8192, 131072):
        clustersim("new", "plan", tmp_path / f"{length}.toml", *words, str(length))
    (long, _), (usual, _) = (load(tmp_path / f"{length}.toml") for length in (131072, 8192))
    assert long.tried.parallel["cp"] == [1, 2, 4, 8, 16]
    assert "cp" not in usual.tried.parallel
    assert [16 * samples for samples in long.batch.samples] == list(usual.batch.samples)


def test_a_length_of_what_has_none_is_refused(clustersim, tmp_path):
    for kind in ("scenario", "plan"):
        done = clustersim("new", kind, tmp_path / "s.toml", "--model", "resnet50", "--seq-len", "4096")
        assert (done.returncode, done.stderr.count("--seq-len 4096")) == (2, 1)
        assert not (tmp_path / "s.toml").exists()
