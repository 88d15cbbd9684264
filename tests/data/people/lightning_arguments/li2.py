import argparse

import pytorch_lightning as pl
from mine import Lit, loader

p = argparse.ArgumentParser()
p.add_argument("--gpus", type=int, default=8)
args = p.parse_args()
trainer = pl.Trainer(devices=args.gpus, accelerator="gpu", strategy="deepspeed_stage_3", precision="bf16")
trainer.fit(Lit(), loader())
