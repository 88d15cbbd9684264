"""Recipes of ``clustersim new scenario``: how a named framework trains when its documentation is followed.

A recipe is a draft in ``data/new/recipes/`` and a list of settings, the one that an expert would take first: the first
that fits into memory is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

from clustersim.core.dims import powers_of_two
from clustersim.core.paths import data_path
from clustersim.core.texts import Table

if TYPE_CHECKING:
    from clustersim.training.parallel import ModelShape

RECIPES = {
    "pytorch": "PyTorch: DistributedDataParallel with autocast, as its tutorials have it.",
    "torchtitan": "torchtitan: FSDP2 with 16-bit parameters and torch.compile, as its published runs have it.",
    "megatron": "Megatron-Core: its mixed-precision DDP with a distributed optimizer, as its examples have it.",
    "deepspeed": "DeepSpeed: ZeRO with 16-bit parameters, as its tutorials have it.",
}
"""Name -> what the head of a file says of it."""
USUAL = ("pytorch", "torchtitan", "deepspeed", "megatron")
"""Where nobody asks for one: in turn, the first that fits without a host; then those that offload to it."""
OP_BY_OP = ("pytorch", "deepspeed")
"""Recipes whose framework runs a model as PyTorch does, op by op, unless a script compiles it; what ``import`` reads of
their files plays the same."""
OF_STRATEGY = {"ddp": "pytorch", "fsdp": "torchtitan", "zero": "deepspeed"}
"""Strategy -> the recipe that has it."""
TOKENS = 8192
"""Tokens of a micro-batch that keep a GPU busy: sizes beyond are not begun with."""
MIXTURE_TOKENS = 4 * TOKENS
"""The same of a mixture, which computes with a few of the experts whose parameters it gathers and reduces."""
BATCH_TOKENS = 1 << 22
"""Tokens of a step of large models: about 4 million, as Llama 3's and others' reports have it."""
SMALLER_BATCHES = ((1e9, 1 << 19), (4e9, 1 << 20))
"""Parameters below which a step has at most so many tokens (GPT-3's table 2.1: 0.5 million to 760M, 1 million of 1.3B
and 2.7B)."""
GPU_TOKENS = 1 << 16
"""Tokens of a step for each GPU, at most: nanoGPT's recipe of GPT-2 has 491,520 on 8 A100s, Llama 2's finetune of 7B
to 70B 262,144 in all. More makes a step longer on few GPUs, and no option better."""
MOST_MICRO_BATCH = 16
MOST_EXPERT_RANKS = 64
MOST_STAGES = 16
"""Pipeline stages that are looked at."""
ENDS = 2
"""Layers that embedding and loss count as."""
OFFLOADED = (
    'offload_optimizer = { device = "cpu", pin_memory = true }   # states and Adam on the host: nothing else tried fits'
)
PARAMETERS_OFFLOADED = (
    'offload_param = { device = "cpu", pin_memory = true }   # parameters, too, which come layer by layer'
)
"""Of stage 3, which alone can."""
OFFLOADED_PASSES = 8
"""Micro-batches of a step whose optimizer is on the host: what that takes, far longer than on GPUs, comes once for all
of them."""
LESS_GRADIENTS = (
    "grad_reduce_in_fp32 = false  # --grad-reduce-in-bf16: gradients of half the size, where nothing else fits\n"
)
WHOLE_EXPERTS = (
    "etp = 1                      # --expert-tensor-parallel-size: whole experts; they are cut by tp if left out"
)
"""Beside tensor parallelism: experts that are cut by tp as well are on tp x ep ranks, and tokens leave the node."""
CONTEXT = {
    "torchtitan": "cp = {}                       # parallelism.context_parallel_degree: of a sample's tokens\n",
    "megatron": "cp = {}                       # --context-parallel-size: of a sample's tokens\n",
}
"""Of samples of more than :data:`TOKENS` tokens."""
COUNTED = """account_for_embedding_in_pipeline_split = true   # counts as a layer, so that stages are of equal size
account_for_loss_in_pipeline_split = true        # and so does this
"""
"""Of layers that divide over stages so alone, as Llama 3 405B's 126 do."""


@dataclass(frozen=True)
class RecipePlace:
    """Where and of what a recipe is written.

    shape : the model's sizes; None for one that reads no tokens. experts : a mixture's number of them, 0 for none.
    dtype : 16-bit type of the GPUs. nodes, per_node : the machine. per_domain : GPUs that share NVSwitches; 0 where
        those of a node do.
    """

    shape: ModelShape | None
    dtype: str
    nodes: int
    per_node: int
    per_domain: int = 0

    @property
    def side_by_side(self) -> int:
        """GPUs that reach each other without the network: of a node, or of an NVLink domain of several."""
        return max(self.per_node, self.per_domain)

    @property
    def micro_batches(self) -> list[int]:
        """Samples of a micro-batch, the largest first: what makes :data:`TOKENS` tokens, and less."""
        tokens = MIXTURE_TOKENS if self.shape is not None and self.shape.experts else TOKENS
        most = 32 if self.shape is None else max(1, tokens // max(1, self.shape.seq_len))
        sizes = [1 << i for i in range(most.bit_length())]
        return sizes[::-1]

    def counts_ends(self, stages: int) -> bool:
        """Whether layers divide over stages only where embedding and loss count as one each."""
        layers = 0 if self.shape is None else self.shape.layers
        return layers % stages != 0 and (layers + ENDS) % stages == 0

    @property
    def contexts(self) -> list[int]:
        """Degrees of context parallelism, the least first: those that leave a rank :data:`TOKENS` tokens of a sample,
        in the two chunks that balance a causal mask; 1 alone for samples that are no longer."""
        tokens = 0 if self.shape is None else self.shape.seq_len
        most = max(1, min(self.nodes * self.per_node, tokens // TOKENS))
        return [n for n in powers_of_two(most) if n == 1 or tokens % (2 * n) == 0]

    def replicas(self, ranks: int) -> bool:
        """Whether the machine divides into replicas of so many ranks."""
        return self.nodes * self.per_node % ranks == 0

    @property
    def splits(self) -> list[tuple[int, int]]:
        """:attr:`degrees`, and those where embedding and loss count as layers, as Megatron-Core has it."""
        if self.shape is None:
            return self.degrees
        tensor = sorted({tp for tp, _ in self.degrees})
        return self._by_size([*self.degrees, *itertools.product(tensor, self._stages(self.counts_ends))])

    @property
    def degrees(self) -> list[tuple[int, int]]:
        """(tp, pp) that divide model and machine, the least split first; of equal ones tensor parallelism."""
        if self.shape is None:
            return [(1, 1)]
        tensor = [n for n in powers_of_two(self.per_node) if self.shape.heads % n == 0 and self.shape.kv_heads % n == 0]
        layers = self.shape.layers
        return self._by_size(itertools.product(tensor, self._stages(lambda stages: layers % stages == 0)))

    def _stages(self, divides: Callable[[int], bool]) -> list[int]:
        """Numbers of stages that divide the GPUs, at most one a node: twelve nodes have 3 and 6 beside 2, 4 and 8."""
        most = min(self.nodes, MOST_STAGES)
        return [stages for stages in range(1, most + 1) if self.replicas(stages) and divides(stages)]

    def _by_size(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs (tp, pp) that divide the GPUs, the least split first; of equal ones tensor parallelism."""
        dividing = [(tp, pp) for tp, pp in pairs if self.replicas(tp * pp)]
        return sorted(dividing, key=lambda pair: (pair[0] * pair[1], -pair[0]))


def settings(recipe: str, place: RecipePlace) -> Iterator[Table]:
    """What a recipe may be filled in with, the best first; what lies nearer the front costs less time."""
    micros = place.micro_batches
    if recipe == "pytorch":
        for recomputed, micro in itertools.product(("none", "full"), micros):
            yield {"kept": recomputed, "micro": micro}
    elif recipe == "torchtitan":
        tensor = sorted(tp for tp, pp in place.degrees if pp == 1)
        ways = itertools.product(tensor, ("selective", "full"), place.contexts, micros)
        for tp, recomputed, cp, micro in ways:
            if cp == 1 or place.replicas(tp * cp):
                yield {"tp": tp, "cp": cp, "kept": recomputed, "micro": micro}
    elif recipe == "deepspeed":
        for recomputed, stage, micro in itertools.product(("none", "full"), (1, 2, 3), micros):
            yield {"stage": stage, "kept": recomputed, "micro": micro}
    else:
        for recomputed, gradients in (("none", ""), ("full", ""), ("full", LESS_GRADIENTS)):
            for (tp, pp), cp in itertools.product(place.splits, place.contexts):
                if cp > 1 and not place.replicas(tp * pp * cp):
                    continue
                for micro in micros if pp == 1 else micros[-1:]:
                    split = {"tp": tp, "pp": pp, "cp": cp}
                    yield {**split, "kept": recomputed, "micro": micro, "gradients": gradients}


def offloading_settings(recipe: str, place: RecipePlace) -> Iterator[Table]:
    """What a recipe has in reserve for models that fit in no other way: states of its optimizer on the host."""
    if recipe != "deepspeed":
        return
    away = [(1, OFFLOADED), (2, OFFLOADED), (3, OFFLOADED), (3, f"{OFFLOADED}\n{PARAMETERS_OFFLOADED}")]
    for (stage, offloaded), micro in itertools.product(away, place.micro_batches):
        yield {
            "stage": stage,
            "kept": "full",
            "micro": micro,
            "offload": offloaded,
            "passes": OFFLOADED_PASSES,
            "why": "what a step takes the host is shared by all of them",
        }


def recipe_text(recipe: str, place: RecipePlace, chosen: Table) -> str:
    """The tables of a recipe: the end of ``[model]``, ``[strategy]``, ``[parallel]``."""
    text = (data_path("data") / "new" / "recipes" / f"{recipe}.txt").read_text("utf-8")
    values = {
        "tp": 1,
        "pp": 1,
        "stage": 1,
        "dtype": place.dtype,
        "kernels": kernels(place.shape, fused=recipe not in OP_BY_OP),
        "experts": _experts(place, chosen.get("tp", 1)),
        "sequence": str(chosen.get("tp", 1) > 1).lower(),
        "passes": 1 if recipe == "deepspeed" else 4 * chosen.get("pp", 1),
        "why": "micro-batches of a step",
        "gradients": "",
        "context": CONTEXT[recipe].format(chosen.get("cp", 1)) if place.contexts != [1] and recipe in CONTEXT else "",
        "counted": COUNTED if place.counts_ends(chosen.get("pp", 1)) else "",
        "offload": "",
    }
    return Template(text).substitute(values | chosen)


def kernels(shape: ModelShape | None, *, fused: bool = True) -> str:
    """Lines of ``[model]`` with the kernels that training uses; nothing where a model has no choice."""
    if shape is None:
        return ""
    if fused:
        others = 'implementation = "fused"     # torch.compile or Transformer Engine; "eager" is op by op\n'
    else:
        others = '# implementation = "fused"   # with torch.compile; without it all others are op by op\n'
    if shape.biased:  # T5's class has no other
        return 'attention = "eager"          # scores in memory, to which positions are added\n' + others
    return 'attention = "flash"          # one kernel, scores never in memory\n' + others


def batch_of(shape: ModelShape | None, gpus: int, context: int = 1) -> tuple[int, int]:
    """Samples of a step at least and at most, of what has tokens by the rule that :func:`batch_rule` tells: so many
    for each GPU, or for ``context`` GPUs that share a sample's tokens, a power of 2, and one at least."""
    if shape is None or not shape.seq_len:
        return 256, max(1024, gpus)
    tokens = min(_most_tokens(shape), gpus * GPU_TOKENS)
    replicas = max(1, gpus // context)
    each = max(1, tokens // (shape.seq_len * replicas))
    most = replicas << each.bit_length() - 1
    return max(1, most // 2), most


def _most_tokens(shape: ModelShape) -> int:
    """Tokens of a step that a model of this size has at most, on however many GPUs; of a mixture, as of a large one."""
    parameters = 12 * shape.layers * shape.hidden**2  # of a dense block (Kaplan et al., arXiv 2001.08361, table 1)
    smaller = (tokens for below, tokens in SMALLER_BATCHES if parameters < below and not shape.experts)
    return next(smaller, BATCH_TOKENS)


def batch_rule(shape: ModelShape | None, context: int = 1) -> str:
    """Comments that say by which rule a plan's batch is what it is; empty of a model that has no tokens."""
    if shape is None or not shape.seq_len:
        return ""
    sharing = "a GPU" if context == 1 else f"{context} GPUs"
    return (
        f"# {GPU_TOKENS:,} tokens for each GPU of the largest machine (nanoGPT's GPT-2 on 8 A100s), at most "
        f"{_most_tokens(shape):,} in all\n"
        f"# (of this size: GPT-3's table 2.1, Llama 3's report), a sample {sharing} at least. "
        "Of a finetune give its own.\n"
    )


def tokens_of(least: int, most: int, shape: ModelShape | None) -> str:
    """Tokens of the smallest and of the largest step that a plan may try, behind its ``samples``; empty of a model
    that has none."""
    if shape is None:
        return ""
    low, high = (f"{samples * shape.seq_len / 1e6:,.1f}" for samples in (least, most))
    return f"; about {low} to {high} million tokens" if low != high else f"; about {high} million tokens"


OWN_TABLES = {
    "of_ddp": (
        "use_distributed_optimizer = true",
        "overlap_grad_reduce = true",
        "overlap_param_gather = true",
    ),
    "of_fsdp": ('framework = "torchtitan"     # whose defaults hold where nothing is said',),
}
"""What of ``[parallel]`` each strategy of a plan has for itself: the usual settings of the framework that runs it."""


def own_tables(tried: str) -> dict[str, str]:
    """The ``[try.strategies.parallel]`` tables, where ``tried``, of :func:`degrees_tried`, splits the model at all."""
    head = "\n[try.strategies.parallel]    # with this strategy alone\n"
    for_ddp = {"of_ddp": (WHOLE_EXPERTS,)} if "\nep = " in tried else {}
    own = {name: (*lines, *for_ddp.get(name, ())) for name, lines in OWN_TABLES.items()}
    return {name: head + "\n".join(lines) + "\n" if tried else "" for name, lines in own.items()}


CRAMPED = 0.4
"""Share of a GPU that model states may take, shared out over all GPUs, before a plan tries to keep some on the host:
what else a step keeps would leave small micro-batches, or nothing."""


def offload_tried(states_bytes: float, memory_bytes: float, dtype: str) -> str:
    """The strategy of a plan that keeps the optimizer on the host, where GPUs are small for the model.

    states_bytes : of a GPU, shared out over all. memory_bytes : of a GPU.
    """
    if states_bytes <= CRAMPED * memory_bytes:
        return ""
    return f"""
# DeepSpeed's way where GPUs are small for the model: the optimizer and its states on the host.
[[try.strategies]]
kind = "zero"
param_dtype = "{dtype}"
zero_optimization = {{stage = [2, 3], offload_optimizer = {{device = "cpu", pin_memory = true}}}}
"""


def degrees_tried(places: Sequence[RecipePlace]) -> str:
    """The ``[try.parallel]`` table: what model and machines allow."""
    shape = places[0].shape
    degrees = [pair for place in places for pair in place.degrees]
    tensor = sorted({tp for tp, _ in degrees})
    stages = sorted({pp for _, pp in degrees})
    contexts = sorted({cp for place in places for cp in place.contexts})
    if shape is None or len(tensor) * len(stages) * len(contexts) == 1:
        return ""
    more = (n for n in (2, 3, 5) if any(pp > 1 and shape.layers % (n * pp) == 0 for pp in stages))
    chunks = [1, *more][:3]
    lines = [
        '[try.parallel]               # a value, a list, or "search": all that model and machine allow',
        f"tp = {tensor}",
        f"pp = {stages}",
        *([f"vpp = {chunks}                 # chunks of a stage, interleaved: less bubble"] if len(chunks) > 1 else []),
        *([f"cp = {contexts}     # tokens of a sample shared out"] if len(contexts) > 1 else []),
        *([f"ep = {_expert_degrees(places)}"] if shape.experts else []),
        "sequence_parallel = true     # of what has tp",
    ]
    return "\n".join(lines) + "\n"


def _expert_degrees(places: Sequence[RecipePlace]) -> list[int]:
    """Experts over ranks of a node, and over two and more nodes, as far as they divide."""
    shape = places[0].shape
    most = max(place.nodes * place.per_node for place in places)
    return [n for n in powers_of_two(min(most, MOST_EXPERT_RANKS)) if shape is not None and shape.experts % n == 0]


def _experts(place: RecipePlace, tp: int) -> str:
    if place.shape is None or not place.shape.experts:
        return ""
    near = min(place.side_by_side, place.nodes * place.per_node)
    degree = max(n for n in powers_of_two(near) if place.shape.experts % n == 0 and near % n == 0)
    inside = "a node" if degree <= place.per_node else "an NVLink domain"
    line = f"ep = {degree}                       # experts of a layer shared out inside {inside}, tokens sent to them\n"
    return line + (WHOLE_EXPERTS + "\n" if tp > 1 else "")
