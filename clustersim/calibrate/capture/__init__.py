"""Measure a machine: collectives, compute and training steps, with PyTorch, for fitting and validation.

    torchrun --nnodes N --nproc-per-node 8 -m clustersim.calibrate.capture --out DIR --budget 10min

A folder holds a run: ``provenance.json``, a file of JSON lines per part (``collectives.jsonl``, ``compute.jsonl``,
``steps.jsonl``; ``*.jsonl.partial`` while it is being written, readable as well), and profiler traces of every rank,
``traces/MODE/rankR.json.gz``. torch is imported when a capture runs, never before.
``clustersim.files.traces.read(DIR)`` gives the collectives as Samples.

Everything is measured in short loops; collectives in several rounds, whose spread is the noise. Rows of ``compute`` and
``steps`` on CPUs carry CPU time as well (``time_cpu``), which other work on the machine does not lengthen.

What has run where: everything on Gloo, with 2 and 4 CPU ranks, runs in the tests. The CUDA and NCCL paths are the same
code with CUDA events and device memory; they, DataParallel, several nodes (rails) and ``--share-gpu`` are written after
the libraries' documentation, are tried with fakes where that can be, and have not run on a GPU yet.
"""
