import lightning
from lightning.pytorch.strategies import FSDPStrategy
from mine import Block, Lit, data, logger
from torch.distributed.fsdp import ShardingStrategy

NODES = 2


def main():
    strategy = FSDPStrategy(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy={Block},
        activation_checkpointing_policy={Block},
        cpu_offload=False,
    )
    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=[0, 1, 2, 3],
        num_nodes=NODES,
        strategy=strategy,
        precision="bf16-true",
        accumulate_grad_batches=4,
        logger=logger,
    )
    trainer.fit(Lit(), data)
