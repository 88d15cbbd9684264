import pytorch_lightning as pl
from mine import Lit, words
from torch.utils.data import DataLoader

trainer = pl.Trainer(devices=8, accelerator="gpu", strategy="deepspeed_stage_3", precision="bf16")
trainer.fit(Lit(), DataLoader(words, batch_size=4))
