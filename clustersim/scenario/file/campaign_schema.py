"""The ``[campaign]`` table of a scenario: what a whole training meets, as data. No rate has a default."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from clustersim.core.texts import Table
from clustersim.core.units import Bandwidth, Seconds
from clustersim.scenario.file.campaign_units import Duration, Every, Rate

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=10_000_000)]


class _StrictCampaign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a misspelt field is an error."""


class FailureCause(_StrictCampaign, frozen=True):
    """``[[campaign.failures]]``: one way in which a job fails.

    Parameters
    ----------
    name : in tables. rate : with its unit, ``"1.34 per 1000 node-days"``, per gpu, node, rack, switch or (``"1 per
        week"``) job; ``"1.34 per 1000 node-days of 8 GPUs"`` is the same of every 8 GPUs, in nodes of any size.
    shape : of a Weibull law; 1 is exponential, below 1 new machines fail first.
    scope : what is lost and must be replaced: a ``node`` (also of one GPU), a ``rack``, all nodes of a ``switch``, or
        nothing (``job``: software).
    silent : share of these failures that nothing reports, so that the timeout finds them.
    detect : until one that is reported is noticed; ``campaign.detection.report`` when absent.
    repair : until the lost nodes are back in the pool; ``campaign.nodes.repair`` when absent.
    source : where it is from.
    """

    name: str
    rate: Rate
    shape: Annotated[float, Meta(gt=0.1, le=10)] = 1.0
    scope: Literal["node", "rack", "switch", "job"] = "node"
    silent: Share = 0.0
    detect: Duration | None = None
    repair: Duration | None = None
    source: str = ""


class Detection(_StrictCampaign, frozen=True):
    """``[campaign.detection]``: how long a failure goes unnoticed, and how long it takes to say where it is.

    Parameters
    ----------
    report : until a failure that something reports is noticed (a log, a health check, an inspection).
    timeout : until a silent one is: PyTorch's NCCL timeout is 10 min. locate : from then until the node is known.
    """

    report: Duration | None = None
    timeout: Duration | None = None
    locate: Duration | None = None


class Recovery(_StrictCampaign, frozen=True):
    """``[campaign.recovery]``: what is done about a failure.

    Parameters
    ----------
    policy : ``requeue``: the whole job is asked for again, whatever failed; ``replace``: lost nodes are replaced by
        spares, and a failure that loses none restarts in place; ``shrink``: like that, but where no spare is free the
        job goes on smaller; ``drop_replica``: the other replicas of the model go on at once, and no step is lost.
    replace : until new nodes, or with ``requeue`` the job, are there when some are free.
    restart : processes, communicators, compilation and warm-up.
    """

    policy: Literal["requeue", "replace", "shrink", "drop_replica"]
    replace: Duration | None = None
    restart: Duration | None = None


class Checkpoint(_StrictCampaign, frozen=True):
    """``[[campaign.checkpoints]]``: one kind of save; several may be used at a time.

    Parameters
    ----------
    every : training time (``"30 min"``), steps (``"100 steps"``), or ``"best"``, by Daly's exact condition.
    tier : what it survives: ``memory`` of peers, the loss of a node but of no rack; ``local`` disks, failures that lose
        no node; ``storage``, all.
    asynchronous : training goes on while it is written, and it counts only when that is over.
    stall : how long training stands still; from its bytes and ``campaign.storage`` when absent.
    write : from its beginning until it can be loaded; as above. load : as above.
    bytes_per_parameter : what the strategy and optimizer keep when absent: 14 for bf16 with Adam.
    """

    every: Every
    tier: Literal["memory", "local", "storage"] = "storage"
    asynchronous: bool = False
    stall: Seconds | None = None
    write: Seconds | None = None
    load: Duration | None = None
    bytes_per_parameter: Annotated[float, Meta(gt=0, le=100)] | None = None


class Storage(_StrictCampaign, frozen=True):
    """``[campaign.storage]``: what checkpoints are written to.

    Parameters
    ----------
    write, read : of all ranks together. copy : from one GPU to its host, which an asynchronous save waits for.
    barrier : added to each save.
    """

    write: Bandwidth
    read: Bandwidth
    copy: Bandwidth | None = None
    barrier: Seconds | None = None


class NodePool(_StrictCampaign, frozen=True):
    """``[campaign.nodes]``: what stands ready, and what fails together.

    Parameters
    ----------
    spares : nodes that stand by and are paid for; as many as are asked for, and unpaid, when absent.
    repair : until a lost node is a spare. rack, switch : nodes of one.
    """

    spares: Count | None = None
    repair: Duration | None = None
    rack: Annotated[int, Meta(ge=1)] | None = None
    switch: Annotated[int, Meta(ge=1)] | None = None


class Planned(_StrictCampaign, frozen=True):
    """``[[campaign.calendar]]``: what interrupts training on purpose.

    Parameters
    ----------
    name : in tables. kind : ``evaluation``: training stands still and goes on; ``maintenance``: the job saves, stops,
        and starts again. every : of an evaluation steps or training time, of maintenance elapsed time.
    lasts : how long, a restart not counted.
    """

    name: str
    kind: Literal["evaluation", "maintenance"]
    every: Every
    lasts: Seconds | None = None


class Degraded(_StrictCampaign, frozen=True):
    """``[[campaign.degraded]]``: something is slow for a while, and the job goes on.

    Parameters
    ----------
    name : in tables. rate : how often it begins. lasts : until it is over, or found and replaced.
    factor : how many times longer a step is; instead of it the step is simulated with ``speed``, one GPU's share of its
        pace, or with ``match`` and ``bandwidth``, links as in ``[[cluster.changes]]`` and their share of line rate.
    """

    name: str
    rate: Rate
    lasts: Duration
    factor: Annotated[float, Meta(ge=1, le=1000)] | None = None
    speed: Annotated[float, Meta(ge=1e-3, le=1)] | None = None
    match: str | None = None
    bandwidth: Annotated[float, Meta(ge=1e-6, le=1)] = 0.5

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.factor, self.speed, self.match)) != 1:
            raise ValueError("write one of factor, speed and match: how much slower a step is, or what is slow")


class Price(_StrictCampaign, frozen=True):
    """``[campaign.price]``: what an hour costs.

    Parameters
    ----------
    usd_per_gpu_hour : the shipped list price of the GPU when absent. usd_per_kwh : of power; not counted when absent.
    """

    usd_per_gpu_hour: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    usd_per_kwh: Annotated[float, Meta(gt=0, le=1e3)] | None = None


class CampaignTable(_StrictCampaign, frozen=True):
    """``[campaign]``: a whole training, where the scenario is one step of it. Say one of tokens, steps and duration.

    Parameters
    ----------
    tokens, steps, duration : how much is trained: ``duration`` is time of steps at the scenario's pace.
    failures : causes, or the name of a shipped set (``clustersim list failures``).
    factor : rates of all causes are multiplied by it.
    """

    failures: str | tuple[FailureCause, ...]
    recovery: Recovery
    checkpoints: Annotated[tuple[Checkpoint, ...], Meta(min_length=1)]
    tokens: Annotated[float, Meta(gt=0, le=1e18)] | None = None
    steps: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    duration: Seconds | None = None
    factor: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    detection: Detection = Detection()
    storage: Storage | None = None
    nodes: NodePool = NodePool()
    calendar: tuple[Planned, ...] = ()
    degraded: tuple[Degraded, ...] = ()
    price: Price = Price()

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.tokens, self.steps, self.duration)) != 1:
            raise ValueError("write one of tokens, steps and duration: how much is trained")
        if self.duration is not None and not self.duration > 0:
            raise ValueError("a duration of 0 s trains nothing; write one above it")

    def plain(self) -> Table:
        """Every field in plain values."""
        builtins_table: Table = msgspec.to_builtins(self, enc_hook=str)
        return builtins_table
