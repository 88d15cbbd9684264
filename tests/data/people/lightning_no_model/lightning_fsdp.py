import lightning
from lightning.pytorch.strategies import FSDPStrategy
from mine import Lit, loader

strategy = FSDPStrategy(sharding_strategy="FULL_SHARD", cpu_offload=False)
trainer = lightning.Trainer(devices=8, num_nodes=2, precision="bf16-mixed", strategy=strategy)
trainer.fit(Lit("meta-llama/Llama-2-7b-hf"), loader(batch_size=4))
